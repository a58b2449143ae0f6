"""Small models of the kinds that people write, and structures for them: faster ones, wrong ones, approximate ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashrt_ros.accelerate import Gates, ModuleStructure, Observation
from flashrt_ros.accelerate.gates import FEWEST_ROUNDS

QUICK = Gates(rounds=FEWEST_ROUNDS, fewest_calls=1, turn_s=0)  # operations are counted: all rounds are equal
ROWS, WIDTH = 192, 64


class RowByRowNorm(nn.Module):
    """RMSNorm as somebody wrote it who had one row in mind: twenty times slower than it need be."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width) * 0.1)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        rows = [row / torch.sqrt((row * row).mean() + self.eps) * (1 + self.gain) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(x.shape)


class SwiGlu(nn.Module):
    """The usual block, with names that nobody else uses."""

    def __init__(self, width: int = WIDTH, hidden: int = 96) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.c = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(F.silu(self.b(x)) * self.a(x))
        return result


class Attention(nn.Module):
    """Self-attention of one head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = RowByRowNorm(), Attention(), SwiGlu()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.mlp(x)
        return result


class Scale(nn.Module):
    """Multiplies each dimension, row by row; `kind` tells two of them apart."""

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = kind
        self.factor = nn.Parameter(1 + torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.factor for row in x.reshape(-1, x.shape[-1])]).view(x.shape)


def transformer(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).eval()


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), RowByRowNorm(), nn.GELU(), nn.Linear(WIDTH, 8)).eval()


def convolution(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Unflatten(1, (1, ROWS)), nn.Conv2d(1, 2, 3, padding=1), RowByRowNorm()).eval()


def two_scales(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Scale("a"), Scale("b")).eval()


MODELS: tuple[Callable[[], nn.Sequential], ...] = (transformer, mlp, convolution)


def qwen3(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, list[dict[str, Any]]]:
    """transformers' Qwen3 of four layers with seeded weights, and two texts of 48 tokens as keyword arguments."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=500, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen3ForCausalLM(config).to(device, dtype).eval()
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 500, (1, 48), generator=generator).to(device) for _ in range(2)]
    return model, [{"input_ids": text, "use_cache": False, "logits_to_keep": 1} for text in texts]


def with_padding(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The examples with masks of padding, of which the second one's has a gap."""
    padded = [{**text, "attention_mask": torch.ones_like(text["input_ids"])} for text in texts]
    padded[1]["attention_mask"][0, :3] = 0
    return padded


def examples(count: int = 3, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, rows, WIDTH, generator=generator) for _ in range(count)]


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, bit for bit."""
    return {name: tensor.cpu().numpy().tobytes() for name, tensor in model.state_dict().items()}


def traces(model: nn.Module) -> dict[str, Any]:
    """What a replacement could leave behind: instance attributes and hooks of every module."""
    return {path: {name: id(value) for name, value in vars(module).items()} for path, module in model.named_modules()}


class PlantedNorm(ModuleStructure[RowByRowNorm]):
    """A fast kernel for `RowByRowNorm` whose result goes through `fault`."""

    def __init__(self, name: str, fault: Callable[[Tensor], Tensor]) -> None:
        self.name, self._fault = name, fault

    def hypotheses(self, module: nn.Module) -> Iterable[RowByRowNorm]:
        if isinstance(module, RowByRowNorm):
            yield module

    def reference(self, facts: RowByRowNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + facts.gain, facts.eps)

    def kernel(self, facts: RowByRowNorm, observation: Observation) -> Callable[..., Tensor]:
        weight = (1 + facts.gain).detach()
        return lambda x: self._fault(F.rms_norm(x, (x.shape[-1],), weight, facts.eps))


class FastScale(ModuleStructure[Scale]):
    """`Scale` of one kind in one operation, a little too large by `error`."""

    def __init__(self, kind: str, error: float) -> None:
        self.name, self._kind, self._error = f"fast_scale_{kind}", kind, error

    def hypotheses(self, module: nn.Module) -> Iterable[Scale]:
        if isinstance(module, Scale) and module.kind == self._kind:
            yield module

    def reference(self, facts: Scale, x: Tensor) -> Tensor:
        return x * facts.factor

    def kernel(self, facts: Scale, observation: Observation) -> Callable[..., Tensor]:
        factor = (facts.factor * (1 + self._error)).detach()
        return lambda x: x * factor
