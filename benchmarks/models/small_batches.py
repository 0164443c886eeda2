"""Batches for small transformers of each task: inputs as the model's forward names them, and labels as its loss reads.

What the arguments of a forward mean is known by their names, so that most models of a task need nothing of their own.
A task may have several batches; the one to take is the first that the model can be trained with.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.models.small_transformers import CLASSES, HIDDEN, LARGE_IMAGE, PLACES, TEXT_WORDS

BATCH, LENGTH, SOUND, FRAMES, SERIES, LABELS = 4, 16, 4000, 64, 16, 5
Batch = dict[str, Any]


def batches(task: str, model: nn.Module, config: Any) -> Iterator[Batch]:
    """The batches to try, by a fixed seed."""
    names = inspect.signature(model.forward).parameters
    for make in TASKS[task]:
        torch.manual_seed(2)
        made = make(model, config, names)
        if made is not None:
            yield made


def labelled(batch: Batch) -> bool:
    """Whether a model returns its loss for the batch."""
    return any(name in batch for name in ("labels", "mask_labels", "future_values"))


def counted(batch: Batch) -> dict[str, Any]:
    """The option `batch_dim` for a batch: its patches are rows of the images, which their grids count."""
    grid = next((name for name in batch if name.startswith("image_grid")), None)
    return {"pixel_values": fxpipe.rows(grid)} if grid is not None else {}


def floats(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with all its floating values in another precision."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: floats(value, dtype) for name, value in batch.items()}
    return [floats(value, dtype) for value in batch]


def square(output: Any) -> Tensor:
    """A loss of the first floating tensor of what a model without a loss returns."""
    values = output.values() if isinstance(output, dict) else output
    found: Tensor = next(one for one in values if isinstance(one, Tensor) and one.is_floating_point())
    return found.double().pow(2).mean()


def words(*sizes: int) -> Tensor:
    return torch.randint(4, TEXT_WORDS, sizes)


def _text(model: Any, config: Any, names: Any) -> Batch:
    ids = words(BATCH, LENGTH)
    return _named({"input_ids": ids, "labels": ids.clone()}, names)


def _masked(model: Any, config: Any, names: Any) -> Batch:
    ids = words(BATCH, LENGTH)
    return _named({"input_ids": ids, "labels": ids.masked_fill(torch.rand(BATCH, LENGTH) < 0.7, -100)}, names)


def _named(batch: Batch, names: Any) -> Batch:
    """With the names of this forward, and what it needs beside them."""
    if "input_ids" not in names and "inputs" in names:
        batch["inputs"] = batch.pop("input_ids")
    if "bbox" in names and "input_ids" in batch:
        batch["bbox"] = torch.randint(8, (*batch["input_ids"].shape, 1)).repeat(1, 1, 4)
    return batch


def _long_text(model: Any, config: Any, names: Any) -> Batch:
    """As long as a model needs whose attention is over blocks, or whose positions have a shape."""
    shape = getattr(config, "axial_pos_shape", None)
    ids = words(BATCH, shape[0] * shape[1] if shape else 4 * LENGTH)
    return _named({"input_ids": ids, "labels": ids.clone()}, names)


def _decoded(model: Any, config: Any, names: Any) -> Batch:
    return {"input_ids": words(BATCH, LENGTH), "labels": words(BATCH, LENGTH // 2)}


def _codes(model: Any, config: Any, names: Any) -> Batch:
    """Codes of sound, several at a time."""
    count = getattr(config, "num_codebooks", 4)
    return {"input_ids": words(BATCH * count, LENGTH), "labels": words(BATCH, LENGTH, count)}


def pixels(config: Any, *before: int) -> Tensor:
    """Images of the size that the config, or the part of it for images, says."""
    found: Any = None
    for part in [config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config", "encoder"))]:
        found = found or getattr(part, "image_size", None)
    height, width = found if isinstance(found, (list, tuple)) else (found or LARGE_IMAGE,) * 2
    channels = getattr(config, "num_channels", 3)
    return torch.randn(*before, channels if isinstance(channels, int) else 3, height, width, dtype=torch.float64)


def _images(model: Any, config: Any, names: Any) -> Batch:
    labels = torch.randint(CLASSES, (BATCH,))
    if "input_ids" in names and "pixel_values" not in names:
        return {"input_ids": words(BATCH, LENGTH), "labels": labels}
    if "spatial_shapes" in names:
        patches = torch.randn(BATCH, 16, 3 * config.vision_config.patch_size**2, dtype=torch.float64)
        shapes, mask = torch.full((BATCH, 2), 4), torch.ones(BATCH, 16, dtype=torch.long)
        return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes, "labels": labels}
    if "inputs" in names:
        return {"inputs": pixels(config, BATCH), "labels": labels}
    return {"pixel_values": pixels(config, BATCH), "labels": labels}


def _large_images(model: Any, config: Any, names: Any) -> Batch:
    """The size that models expect which cannot have another."""
    key = "inputs" if "inputs" in names else "pixel_values"
    return {key: torch.randn(BATCH, 3, 224, 224, dtype=torch.float64), "labels": torch.arange(BATCH)}


def _pixel_classes(model: Any, config: Any, names: Any) -> Batch:
    images = pixels(config, BATCH)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (BATCH, *images.shape[-2:]))}


def _masks(model: Any, config: Any, names: Any) -> Batch | None:
    """Masks of things, as many as there are in each image."""
    if "mask_labels" not in names:
        return None
    images = pixels(config, BATCH)
    key, values = "pixel_values", images
    if "pixel_values_videos" in names:
        key, values = "pixel_values_videos", images
    made: Batch = {
        key: values,
        "mask_labels": [torch.rand(1 + i % 3, *images.shape[-2:]).gt(0.5).double() for i in range(BATCH)],
        "class_labels": [torch.randint(CLASSES, (1 + i % 3,)) for i in range(BATCH)],
    }
    if "task_inputs" in names:
        made["task_inputs"] = words(BATCH, config.task_seq_len).double()
        made["text_inputs"] = words(
            BATCH, config.num_queries - config.text_encoder_n_ctx, config.text_encoder_context_length
        )
    return made


def _boxes(model: Any, config: Any, names: Any) -> Batch:
    """Boxes by center and size, as many as there are in each image; with a mask of each if the model segments."""
    images = pixels(config, BATCH)
    labels = []
    for i in range(BATCH):
        count = 1 + i % 3
        boxes = torch.cat((0.3 + 0.4 * torch.rand(count, 2), 0.1 + 0.3 * torch.rand(count, 2)), 1).double()
        label = {"class_labels": torch.randint(CLASSES, (count,)), "boxes": boxes}
        if "Segment" in type(model).__name__:
            label["masks"] = torch.rand(count, *images.shape[-2:]).gt(0.5).double()
        labels.append(label)
    return {"pixel_values": images, "labels": labels}


def _only_images(model: Any, config: Any, names: Any) -> Batch:
    """For a model that has no loss of its own."""
    made: Batch = {"pixel_values": pixels(config, BATCH)}
    if "prompt_depth" in names:
        made["prompt_depth"] = torch.rand(BATCH, 1, 8, 8, dtype=torch.float64)
    return made


def _depths(model: Any, config: Any, names: Any) -> Batch:
    images = pixels(config, BATCH)
    return {"pixel_values": images, "labels": 1 + torch.rand(BATCH, *images.shape[-2:], dtype=torch.float64)}


def _sounds(model: Any, config: Any, names: Any) -> Batch:
    labels = torch.randint(1, TEXT_WORDS, (BATCH, LABELS))
    if "input_values" in names:
        return {"input_values": torch.randn(BATCH, SOUND, dtype=torch.float64), "labels": labels}
    encoder = getattr(config, "encoder_config", config)
    found = [getattr(encoder, name, None) for name in ("feature_projection_input_dim", "num_mel_bins", "input_dim")]
    size = next((one for one in found if isinstance(one, int)), 16) * (4 if "Granite" in type(model).__name__ else 1)
    made = {"input_features": torch.randn(BATCH, 4 * FRAMES, size, dtype=torch.float64), "labels": labels}
    if "attention_mask" in names:
        made["attention_mask"] = torch.ones(BATCH, 4 * FRAMES, dtype=torch.long)
    return made


def _channel_of_sound(model: Any, config: Any, names: Any) -> Batch:
    made = _sounds(model, config, names)
    if "padding_mask" in names:
        made["padding_mask"] = torch.ones(BATCH, SOUND, dtype=torch.long)
    return {name: value[:, None] if name == "input_values" else value for name, value in made.items()}


def _series(model: Any, config: Any, names: Any) -> Batch:
    """A series' past and future; with features of the time if the model reads them."""
    lags = getattr(config, "lags_sequence", None)
    past = getattr(config, "context_length", SERIES) + (max(lags) if lags else 0)
    future = getattr(config, "horizon_length", None) or config.prediction_length
    channels = (getattr(config, "num_input_channels", 1),) if "Patch" in type(model).__name__ else ()
    made = {
        "past_values": torch.randn(BATCH, past, *channels, dtype=torch.float64),
        "future_values": torch.randn(BATCH, future, *channels, dtype=torch.float64),
    }
    if "past_time_features" in names:
        made["past_time_features"] = torch.randn(BATCH, past, 1, dtype=torch.float64)
        made["future_time_features"] = torch.randn(BATCH, future, 1, dtype=torch.float64)
        made["past_observed_mask"] = torch.ones(BATCH, past, dtype=torch.float64)
    if "freq" in names:
        made["freq"] = torch.zeros(BATCH, dtype=torch.long)
    return made


def _seen(shape: Callable[[Any, Any], Batch]) -> Callable[[Any, Any, Any], Batch | None]:
    """Text that begins with an image, or a sound, whose values have a shape of the kind."""

    def make(model: Any, config: Any, names: Any) -> Batch | None:
        try:
            given = shape(config, names)
        except (AttributeError, TypeError):
            return None  # the config does not say what this shape needs
        return _with_places(model, config, names, given) if set(given) <= set(names) else None

    return make


def _with_places(model: Any, config: Any, names: Any, given: Batch) -> Batch:
    """As many places in the text as the model has features for: its config says how many, or its error."""
    place = next((one for name in PLACES if isinstance(one := getattr(config, name, None), int)), None)
    count = 0 if place is None else getattr(config, "num_query_tokens", 1)
    for _ in range(4):
        batch = _placed(names, given, place, count)
        try:
            with torch.no_grad():
                model(**floats(batch, next(model.parameters()).dtype))
        except Exception as error:
            said = re.search(r"tokens:? (\d+)\D+features:? (?:torch.Size\(\[)?(\d+)", str(error))
            if said is None or not count:
                return batch
            tokens, features = map(int, said.groups())  # the same number, if the message counts channels, too
            count = max(1, count // HIDDEN if tokens == features else count * features // max(1, tokens))
        else:
            return batch
    return batch


def _placed(names: Any, given: Batch, place: int | None, count: int) -> Batch:
    ids = words(BATCH, 1 + count + LENGTH)
    labels = ids.clone()
    if place is not None:
        ids[:, 1 : 1 + count], labels[:, 1 : 1 + count] = place, -100
    batch = {"input_ids": ids, **given, "labels": labels}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names:
            batch[name] = (ids == place).long() if place is not None else torch.zeros_like(ids)
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(ids)
    if "qformer_input_ids" in names:
        batch["qformer_input_ids"] = words(BATCH, LENGTH)
    return batch


def _image_alone(config: Any, names: Any) -> Batch:
    return {"pixel_values": pixels(config, BATCH)}


def _one_image(config: Any, names: Any) -> Batch:
    return {"pixel_values": pixels(config, BATCH)} | _sizes(config, names)


def _list_of_images(config: Any, names: Any) -> Batch:
    return {"pixel_values": pixels(config, BATCH, 1)} | _sizes(config, names)


def _image_and_parts(config: Any, names: Any) -> Batch:
    return {"pixel_values": pixels(config, BATCH, 2)} | _sizes(config, names)


def _sizes(config: Any, names: Any) -> Batch:
    height, width = pixels(config).shape[-2:]
    made: Batch = {"image_sizes": torch.tensor([[height, width]] * BATCH)} if "image_sizes" in names else {}
    if "image_attention_mask" in names:
        made["image_attention_mask"] = torch.ones(BATCH, 1 + LENGTH, 1, dtype=torch.long)
    return made


def _patches(config: Any, names: Any) -> Batch:
    """Patches of all images one after another, with the number of them in time, height and width."""
    vision = config.vision_config
    size = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    values = torch.randn(BATCH * 16, size, dtype=torch.float64)
    made: Batch = {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
    return made | ({"image_merge_sizes": torch.ones(BATCH).long()} if "image_merge_sizes" in names else {})


def _square_patches(config: Any, names: Any) -> Batch:
    vision = config.vision_config
    values = torch.randn(BATCH * 16, 3, vision.patch_size, vision.patch_size, dtype=torch.float64)
    name = "image_grid_hws" if "image_grid_hws" in names else "image_grid_thw"
    return {"pixel_values": values, name: torch.tensor([[1, 4, 4][-2 if name.endswith("hws") else 0 :]] * BATCH)}


def _patches_with_positions(config: Any, names: Any) -> Batch:
    values = torch.randn(BATCH, 36, 3 * config.vision_config.patch_size**2, dtype=torch.float64)
    where = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).view(1, 36, 2)
    return {"pixel_values": values, "image_position_ids": where.repeat(BATCH, 1, 1)}


def _patches_with_shapes(config: Any, names: Any) -> Batch:
    values = torch.randn(BATCH, 16, 3 * config.vision_config.patch_size**2, dtype=torch.float64)
    made: Batch = {"pixel_values": values, "spatial_shapes": torch.full((BATCH, 2), 4)}
    return made | {"pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}


def _flattened(config: Any, names: Any) -> Batch:
    """Rows of a patch with its place before its pixels."""
    size = 3 * config.vision_config.patch_size**2
    where = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2) + 1.0
    values = torch.cat((where.repeat(BATCH, 1, 1).double(), torch.randn(BATCH, 16, size, dtype=torch.float64)), -1)
    return {"flattened_patches": values}


def _tiles(config: Any, names: Any) -> Batch:
    tiles = config.vision_config.max_num_tiles
    made: Batch = {"pixel_values": pixels(config, BATCH, 1, tiles), "aspect_ratio_ids": torch.ones(BATCH, 1).long()}
    mask = torch.ones(BATCH, 1 + LENGTH, 1, tiles, dtype=torch.long)
    return made | {"aspect_ratio_mask": torch.ones(BATCH, 1, tiles).long(), "cross_attention_mask": mask}


def _sound(config: Any, names: Any) -> Batch:
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
    size = getattr(audio, "num_mel_bins", None) or getattr(audio, "input_dim", 16) or 16
    frames = 2 * getattr(audio, "max_source_positions", FRAMES)
    made: Batch = {"input_features": torch.randn(BATCH, size, frames, dtype=torch.float64)}
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in names:
            made[name] = torch.ones(BATCH, frames, dtype=torch.long)
    return made


def _sound_of_rows(config: Any, names: Any) -> Batch:
    return {name: value.mT if value.is_floating_point() else value for name, value in _sound(config, names).items()}


def _raw_sound(config: Any, names: Any) -> Batch:
    return {"input_values": torch.randn(BATCH, SOUND, dtype=torch.float64)}


VISION = (
    _image_alone,
    _one_image, _list_of_images, _image_and_parts, _patches, _square_patches, _patches_with_positions,
    _patches_with_shapes, _flattened, _tiles,
)  # fmt: skip
SOUNDS = (_sound, _sound_of_rows, _raw_sound)
Make = Callable[[Any, Any, Any], Batch | None]
TASKS: dict[str, tuple[Make, ...]] = {
    "detection": (_boxes, _only_images),
    "ctc": (_sounds, _channel_of_sound),
    "depth": (_depths, _only_images),
    "segmentation": (_masks, _boxes, _pixel_classes, _only_images),
    "series": (_series,),
    "vision-language": tuple(_seen(shape) for shape in VISION),
    "seq2seq": (_decoded, _long_text, *(_seen(shape) for shape in SOUNDS)),
    "masked": (_masked, _long_text),
    "causal": (_text, _long_text, _codes, *(_seen(shape) for shape in VISION)),
    "classification": (_images, _large_images, _only_images),
}
