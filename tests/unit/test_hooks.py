"""Hooks and replaced attributes go in and come out again, and what was there before is what is there afterwards."""

from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from patchpar.shard.hooks import HookSet
from patchpar.strategies.data.text_encoding import encoded_together

X = torch.ones(1, 2)


class Doubling(ModelHook):
    def new_forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return 2 * self.fn_ref.original_forward(x)


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a module has of its own, with copies of what can be changed in place."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}


def test_nothing_is_left() -> None:
    module = nn.Linear(2, 2)
    before, plain = state_of(module), module(X)
    hooks = HookSet()
    hooks.install(module, Doubling(), "doubling")
    hooks.before(module, lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    hooks.after(module, lambda _, args, output: output + 1, prepend=True)
    hooks.replace(module, "extra_repr", lambda: "replaced")
    assert torch.equal(module(X), 2 * nn.functional.linear(X + 1, module.weight, module.bias) + 1)
    assert module.extra_repr() == "replaced"
    hooks.close()
    assert torch.equal(module(X), plain)
    assert state_of(module) == before
    hooks.close()
    assert state_of(module) == before


def test_what_others_have_put_there_comes_back() -> None:
    module = nn.Identity()
    module.forward = lambda x: x + 1  # type: ignore[method-assign]
    own = module.forward
    with HookSet() as hooks:
        hooks.replace(module, "forward", lambda x: 2 * own(x))
        hooks.replace(module, "forward", lambda x: 3 * own(x))
        hooks.install(module, Doubling(), "doubling")
        assert module(1.0) == 12.0
    assert module.forward is own


def test_they_come_out_when_something_fails() -> None:
    module = nn.Identity()
    before = state_of(module)
    with pytest.raises(ZeroDivisionError), HookSet() as hooks:  # noqa: PT012
        hooks.replace(module, "forward", lambda x: 1 / 0)
        hooks.after(module, lambda *_: None)
        module(1.0)
    assert state_of(module) == before


def test_a_pipeline_keeps_its_own_encoder_of_prompts() -> None:
    class Pipe:
        def encode_prompt(self, prompt: str) -> str:
            return prompt

    pipe, unchanged = Pipe(), Pipe()
    own = pipe.encode_prompt = lambda prompt: prompt.upper()  # type: ignore[method-assign]
    for each in (pipe, unchanged):
        with encoded_together(each, None):  # type: ignore[arg-type]
            assert vars(each)["encode_prompt"] is not own
    assert pipe.encode_prompt is own
    assert not vars(unchanged)


class Adds(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Adds a number to what a module returns."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs) + self.number


@pytest.mark.parametrize("others", [1, 2])
def test_a_hook_beneath_it_that_another_removes_does_not_come_back(others: int) -> None:
    """As of `disable_cache`: diffusers then calls the module past the next hook."""
    module = nn.Identity()
    registry, x = HookRegistry.check_if_exists_or_initialize(module), torch.zeros(1)
    for number in range(others):
        registry.register_hook(Adds(10.0**number), f"other {number}")
    with HookSet() as hooks:
        installed = hooks.install(module, Adds(0.5), "ours")
        assert float(module(x)) == 0.5 + sum(10.0**number for number in range(others))
        assert installed.is_reached
        registry.remove_hook(f"other {others - 1}")
        assert not installed.is_reached
        installed.reinstall()
        assert installed.is_reached
        assert float(module(x)) == 0.5 + others - 1
    assert float(module(x)) == others - 1
    assert list(registry.hooks) == ["other 0"][: others - 1]


def test_such_a_hook_is_gone_when_ours_is_taken_out() -> None:
    module, x = nn.Identity(), torch.zeros(1)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Adds(1), "other")
    with HookSet() as hooks:
        hooks.install(module, Adds(0.5), "ours")
        registry.register_hook(Adds(3), "later")
        registry.remove_hook("other")
    assert float(module(x)) == 3
    registry.remove_hook("later")
    assert float(module(x)) == 0
