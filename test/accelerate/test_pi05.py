"""LeRobot's π0.5 as it comes, on our stages; what needs LeRobot is skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import AccelerateError, Report, accelerate
from flashrt_ros.accelerate.calls import seeded
from flashrt_ros.accelerate.sources import check_loaded, lerobot_policy
from flashrt_ros.accelerate.structures.pi05 import float_images
from flashrt_ros.measure.pi05.official import lerobot_version, sizes_of
from flashrt_ros.ops import reference_ops
from test.accelerate.models import QUICK, bits, traces
from test.measure.tiny import tiny_config, write_tiny

needs_lerobot = pytest.mark.skipif(lerobot_version() is None, reason="LeRobot is not installed here")
CPU = torch.device("cpu")


def test_float_planes_become_the_patches_that_pixels_become() -> None:
    size, patch = 28, 14
    pixels = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8)
    layout = torch.tensor([size, size, 3, 0], dtype=torch.int32)
    expected = torch.empty(4, 588)
    reference_ops().pixels_to_patches(pixels.flatten(), layout, patch=patch, out=expected)
    planes = (pixels.permute(2, 0, 1).float() / 255 * 2 - 1).contiguous()
    window = torch.cat((planes.flatten().view(torch.uint8), torch.zeros(64, dtype=torch.uint8)))
    for width in (588, 592):  # the second as padded for products
        out = torch.zeros(4, width)
        float_images(reference_ops()).pixels_to_patches(window, layout, patch=patch, out=out)
        torch.testing.assert_close(out[:, :588], expected)
        assert not out[:, 588:].any()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("pi05") / "checkpoint")


@pytest.fixture
def source(checkpoint: Path) -> Any:
    with sizes_of(tiny_config()):
        return lerobot_policy(checkpoint, CPU, 3)


@pytest.fixture
def report(source: Any) -> Iterator[Report]:
    with accelerate(source.model, source.examples, method=source.method, gates=QUICK) as report:
        assert report.kept == ("pi05_stages",)
        yield report


@needs_lerobot
def test_the_policy_is_found_and_agrees_to_rounding(source: Any) -> None:
    model, examples = source.model, source.examples
    state, marks = bits(model), traces(model)
    with seeded(5, CPU):
        args, kwargs = examples[0]
        expected = model.sample_actions(*args, **kwargs)
    with accelerate(model, examples, method="sample_actions", gates=QUICK) as report:
        assert report.kept == ("pi05_stages",)
        assert report.receipt.result["parity"]["dimension_error"] < 1e-5
        with seeded(5, CPU):
            torch.testing.assert_close(model.sample_actions(*args, **kwargs), expected, rtol=1e-5, atol=1e-5)
        assert bits(model) == state
    assert traces(model) == marks
    with seeded(5, CPU):
        assert torch.equal(model.sample_actions(*args, **kwargs), expected)


@needs_lerobot
def test_it_is_found_inside_a_policy_too(source: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = source.model

        def predict(self, *args: Any, **kwargs: Any) -> Tensor:
            actions: Tensor = self.inside.sample_actions(*args, **kwargs)
            return actions[:, :3]

    with accelerate(Around().eval(), source.examples, method="predict", gates=QUICK) as report:
        assert "pi05_stages" in report.kept
        assert next(v.sites for v in report.receipt.candidates if v.name == "pi05_stages") == ("inside.sample_actions",)


def changed(example: Any, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with arguments given by name."""
    args, kwargs = example
    names = ("images", "img_masks", "tokens", "masks")
    return (), {**dict(zip(names, args, strict=False)), **kwargs, **changes}


@needs_lerobot
def test_shorter_prompts_take_a_shorter_graph_and_agree(source: Any, report: Report) -> None:
    masks = torch.zeros_like(changed(source.examples[0])[1]["masks"])
    for count in (1, 40, 48, 49, 130):
        masks[:, :count] = True
        (_, kwargs) = changed(source.examples[0], masks=masks, noise=torch.ones(1, 6, 32))
        args = [kwargs.pop(name) for name in ("images", "img_masks", "tokens", "masks")]
        result = source.model.sample_actions(*args, noise=kwargs["noise"])
        original = type(source.model).sample_actions(source.model, *args, noise=kwargs["noise"])
        torch.testing.assert_close(result, original, rtol=1e-5, atol=1e-5)


@needs_lerobot
def test_what_the_stages_do_not_know_runs_the_original(source: Any) -> None:
    names, ones = ("images", "img_masks", "tokens", "masks"), torch.ones(1, 6, 32)
    named = [changed(example)[1] for example in source.examples]
    examples = [(tuple(kwargs[name] for name in names), {"noise": ones}) for kwargs in named]
    model = source.model
    with accelerate(model, examples, method="sample_actions", gates=QUICK) as report:
        assert report.kept == ("pi05_stages",)
        images, img_masks, tokens, masks = examples[0][0]
        hidden = [*img_masks[:-1], torch.zeros_like(img_masks[-1])]
        holes = masks.clone()
        holes[:, 3] = False
        for args in ((images, hidden, tokens, masks), (images, img_masks, tokens, holes)):
            expected = type(model).sample_actions(model, *args, noise=ones)
            assert torch.equal(model.sample_actions(*args, noise=ones), expected)
        assert dict(report.tallies[0].misses) == {
            "an image is masked out, or the valid tokens are not the first ones": 2
        }


@needs_lerobot
def test_arguments_with_gradients_leave_none_behind(source: Any, report: Report) -> None:
    (_, kwargs) = changed(source.examples[0])
    args = [kwargs.pop(name) for name in ("images", "img_masks", "tokens", "masks")]
    for noise in (torch.ones(1, 6, 32, requires_grad=True), torch.ones(1, 6, 32)):
        result = source.model.sample_actions(*args, noise=noise)
        assert not result.requires_grad
        original = type(source.model).sample_actions(source.model, *args, noise=noise)
        torch.testing.assert_close(result, original, rtol=1e-5, atol=1e-5)


@needs_lerobot
def test_a_policy_whose_weights_were_not_loaded_is_refused(source: Any, checkpoint: Path) -> None:
    check_loaded(source.model, checkpoint / "model.safetensors")
    with torch.no_grad():
        source.model.action_in_proj.weight[0, 0] += 1
    with pytest.raises(AccelerateError, match=r"1 parameters are not those of .*action_in_proj\.weight"):
        check_loaded(source.model, checkpoint / "model.safetensors")
