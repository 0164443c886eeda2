"""`generate` of transformers, by the stages of a pipe, in one process and over ranks.

    pipe.generate(ids)            on every rank
      generate of transformers      chooses tokens, fills the cache
        forward                     each time all ranks make a call of the pipe, and get what the model returns

`generate` is called on an object of a subclass of the model's class, with the attributes of the model, whose forward is
the pipe. So all that it does besides runs as for the plain model, on every rank alike: all ranks draw the leader's
random numbers, and have the same text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError

from .model_in_other_class import with_methods
from .refused_methods import ALONE, refused_of

# What an encoder returns of what its model returns, by the fields of transformers.
ENCODED = {
    "last_hidden_state": "encoder_last_hidden_state",
    "hidden_states": "encoder_hidden_states",
    "attentions": "encoder_attentions",
}


def generate(pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """As `generate` of the model, on every rank with the same arguments; a streamer is used on the leader alone. Raises
    FxpipeError for what would stop ranks at different tokens."""
    model = driven(pipe, generator(pipe.model))
    given = inspect.signature(model.generate).bind(*args, **kwargs)
    options: dict[str, Any] = given.arguments.get("kwargs", {})
    if options.get("cache_implementation") == "paged":
        raise FxpipeError(f"generate with cache_implementation='paged' {ALONE}")
    with same_draws(pipe) as ranks:
        if ranks > 1:
            config = given.arguments.get("generation_config") or model.generation_config
            if options.get("max_time", getattr(config, "max_time", None)) is not None:
                raise FxpipeError(
                    "max_time stops each rank by its own clock, and all make the same calls: give max_new_tokens"
                )
        if given.arguments.get("streamer") is not None and not pipe.leads:
            given.arguments["streamer"] = Silent()
        return model.generate(*given.args, **given.kwargs)


class Silent:
    """A streamer that tells nobody."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


def generator(model: Any) -> Any:
    """The model of transformers that generates: the model itself, or the one that an adapter of PEFT is in. Raises
    FxpipeError where PEFT does more than to call it."""
    if not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        raise FxpipeError(
            f"generate with {config.peft_type.value} depends on where the prompt ends, which the stages of a pipe do "
            "not know: on all ranks call pipe.gather(), and then pipe.model.generate(...)"
        )
    return model.get_base_model()


def driven(pipe: Any, model: Any) -> Any:
    """The model that generates, whose forward is the pipe."""
    kind = type(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        if model.training:  # the leader draws the seed of a call
            draw_alike(pipe)
        return pipe.forward_only(*args, **for_each_sample(kwargs))

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.get_encoder(self, *args, **kwargs)
        return Encoder(found, call, start(self)) if self.config.is_encoder_decoder else found

    return with_methods(
        model,
        __call__=forward,
        forward=forward,
        get_encoder=get_encoder,
        **refused_of(kind),
        _valid_auto_compile_criteria=lambda self, *args, **kwargs: False,  # the stages are compiled already
    )


def for_each_sample(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with positions for each sample where there is one row for all."""
    positions = kwargs.get("position_ids")
    samples = max((len(x) for x in kwargs.values() if isinstance(x, Tensor) and x.dim() > 1), default=1)
    if isinstance(positions, Tensor) and positions.dim() > 1 and len(positions) == 1 < samples:
        return {**kwargs, "position_ids": positions.expand(samples, *positions.shape[1:]).contiguous()}
    return kwargs


def start(model: Any) -> int:
    """A token that the decoder may begin with."""
    configs = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = (getattr(config, name, None) for name in names for config in configs)
    return next((one for one in found if isinstance(one, int)), 0)


class Encoder:
    """The encoder of a model, which is called by itself: in the pipeline, a call of the whole model with one token for
    the decoder.

    - `own`: the encoder itself; `call`: a call of the pipe; `token`: that for the decoder.
    """

    def __init__(self, own: Any, call: Callable[..., Any], token: int) -> None:
        self.own, self.call, self.token = own, call, token
        self.main_input_name = getattr(own, "main_input_name", "input_ids")

    @property
    def forward(self) -> Callable[..., Any]:
        """With the signature of the encoder's own."""
        forward: Any = self.own.forward

        @wraps(forward)
        def run(**kwargs: Any) -> Any:
            return self(**kwargs)

        return run

    def __call__(self, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        samples = next(x for x in kwargs.values() if isinstance(x, Tensor))
        first = torch.full((len(samples), 1), self.token, dtype=torch.long, device=samples.device)
        found = self.call(**kwargs, decoder_input_ids=first, use_cache=False)
        return BaseModelOutput(**{name: getattr(found, field, None) for name, field in ENCODED.items()})


@contextmanager
def same_draws(pipe: Any) -> Iterator[int]:
    """A context in which all ranks draw the leader's random numbers. A rank whose generators were in another state has
    that again at the end. Yields the number of ranks."""
    before, ranks = states(), draw_alike(pipe)
    differs = [not torch.equal(one, other) for one, other in zip(before, states(), strict=True)]
    try:
        yield ranks
    finally:
        if any(differs):
            put(before)


def draw_alike(pipe: Any) -> int:
    """Let the random generators of this rank be those of the leader. Returns the number of ranks."""
    found = pipe.collect(states(), "generate")
    put(found[0])
    return len(found)


def states() -> list[Tensor]:
    """The states of the default generators of the CPU and of the current accelerator, if it has been used."""
    return [torch.get_rng_state(), *(module.get_rng_state() for module in accelerators())]


def put(found: list[Tensor]) -> None:
    """Set these states."""
    torch.set_rng_state(found[0])
    for module, state in zip(accelerators(), found[1:], strict=False):
        module.set_rng_state(state)


def accelerators() -> list[Any]:
    """The module of the current accelerator, as torch.cuda, if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None else [torch.get_device_module(device)]
