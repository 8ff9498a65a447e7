"""The transformers class that a config names: whether it can be served, and with its weights.

A model is first built without memory and run once (on the meta device), so that what its layers
bring to attention is seen rather than believed, before weights are read. No code that comes with
a model is ever run, no pickle is read, and nothing is fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from pdrt.device.foreignattention import NAME, Shapes, Unserved, register, running
from pdrt.device.weights import Checkpoint, Progress
from pdrt.errors import ConfigError
from pdrt.modelspec import ModelSpec

FAILURES: Final = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers raises for a model that it cannot make."""


@dataclass(frozen=True, slots=True)
class Found:
    """`spec` has the shapes that the model's own code brings."""

    spec: ModelSpec
    kind: Any  # transformers has no types
    config: Any


def find(path: Path, spec: ModelSpec) -> Found:
    """Raises ConfigError, naming the architecture and why it is not served."""
    register()
    name = spec.architecture
    if name not in _causal():
        raise refusal(spec, f"transformers {transformers.__version__} has no such language model")
    kind = getattr(transformers, name)
    with refusing(spec, "its config is not understood"):
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    if not isinstance(config, kind.config_class):
        raise refusal(spec, f"its model_type is {config.model_type!r}, which is another model's")
    if kind._is_stateful:  # noqa: SLF001 - says it of the class, in transformers' own words
        raise refusal(spec, "it keeps a state beside keys and values (state-space or recurrent)")
    if not kind._supports_attention_backend:  # noqa: SLF001 - so does this
        raise refusal(spec, "its attention does not go through transformers' attention interface")
    return Found(_measured(spec, kind, config), kind, config)


def read(found: Found, path: Path, dtype: torch.dtype, progress: Progress) -> Any:
    """The model with its weights, on the CPU."""
    weights = Checkpoint(path, progress)  # says what is wrong with the files
    with refusing(found.spec, "its weights cannot be read"), _told(progress):
        model, notes = found.kind.from_pretrained(
            path,
            config=found.config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(notes["missing_keys"]):
        raise ConfigError(f"{path}: the weights lack {', '.join(missing[:3])}")
    weights.finish()
    return model.eval().requires_grad_(False)


def decoder_of(model: Any) -> Any:
    """The part that makes hidden states, without the head. Some models do not know theirs."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def refusal(spec: ModelSpec, why: str) -> ConfigError:
    return ConfigError(f"[model] path: {spec.architecture} is not supported: {why}")


@contextmanager
def refusing(spec: ModelSpec, what: str) -> Iterator[None]:
    """Whatever transformers raises becomes a ConfigError."""
    try:
        yield
    except Unserved as error:
        raise refusal(spec, str(error)) from error
    except FAILURES as error:
        raise refusal(spec, f"{what}: {type(error).__name__}: {error}") from error


def _causal() -> set[str]:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {name for value in named for name in ([value] if isinstance(value, str) else value)}


def _measured(spec: ModelSpec, kind: Any, config: Any) -> ModelSpec:
    """The spec with what attention is brought. Raises ConfigError when no pool can hold it."""
    text = config.get_text_config()
    spec = replace(spec, vocab=text.vocab_size)
    shapes = Shapes([])
    with refusing(spec, "it cannot be built"), torch.device("meta"):
        model = kind._from_config(  # noqa: SLF001 - AutoModel would choose by model_type
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=NAME
        ).eval()
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with refusing(spec, "it cannot be run"), running(shapes):
        try:
            decoder_of(model)(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=ids,
                use_cache=False,
            )
        except NotImplementedError:
            return spec  # it looks at values, of which there are none; the check comes later
    if len(shapes.layers) != text.num_hidden_layers:
        why = f"{len(shapes.layers)} of its {text.num_hidden_layers} layers attend"
        raise refusal(spec, why)
    if len(set(shapes.layers)) > 1:
        differing = ", ".join(map(str, sorted(set(shapes.layers))))
        raise refusal(spec, f"its layers differ in (kv heads, key width, value width): {differing}")
    kv_heads, width, value_width = shapes.layers[0]
    if width != value_width:
        raise refusal(spec, f"its keys are {width} wide and its values {value_width}")
    return replace(spec, layers=len(shapes.layers), kv_heads=kv_heads, head_dim=width)


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """Progress bars that transformers would draw are told of instead."""

    def hook(factory: Callable[..., object], args: tuple[Any, ...], kwargs: Any) -> object:
        return _counted(args[0], progress) if args else factory(**kwargs)

    logging.disable_progress_bar()
    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _counted(items: Iterable[object], progress: Progress) -> Iterator[object]:
    total = len(items) if isinstance(items, Sized) else 0
    for done, item in enumerate(items, 1):
        yield item
        progress("weights", done, total)
