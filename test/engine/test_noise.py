"""The state of the noise is at hand without asking the generator, and equal states give equal noise."""

from __future__ import annotations

import torch

from flashrt_ros.engine.noise import Noise, state_bytes


def drawn(noise: Noise, count: int = 5) -> torch.Tensor:
    target = torch.empty(count)
    noise.draw(target)
    return target


def test_it_is_torchs_noise_of_that_seed() -> None:
    generator = torch.Generator().manual_seed(7)
    noise = Noise(7)
    for _ in range(3):
        assert drawn(noise).equal(torch.empty(5).normal_(generator=generator))
        assert noise.state.equal(generator.get_state())
    assert noise.state.numel() == state_bytes()


def test_it_goes_back_to_a_state_as_often_as_one_likes() -> None:
    noise = Noise(1)
    drawn(noise)
    state = noise.state
    kept = state.clone()
    first = drawn(noise)
    for _ in range(2):
        noise.go_back(state)
        assert noise.state is state
        assert drawn(noise).equal(first)
    assert state.equal(kept)  # others may hold it


def test_a_state_that_was_gone_back_to_and_left_again_does_not_come_back() -> None:
    noise, other = Noise(1), Noise(2)
    noise.go_back(other.state)
    noise.seed(3)
    assert drawn(noise).equal(drawn(Noise(3)))


def test_going_back_twice_ends_at_the_second() -> None:
    noise = Noise(1)
    noise.go_back(Noise(2).state)
    noise.go_back(Noise(3).state)
    assert drawn(noise).equal(drawn(Noise(3)))
