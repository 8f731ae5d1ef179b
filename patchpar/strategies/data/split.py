"""Data parallelism: a list of prompts on the ranks of axis `data`; each rank makes a plain call with its prompts.

What is split: the arguments that hold one entry per prompt. What is exchanged: only the outputs, at the end.

    prompts   a b c d e     rank 0: a b c     rank 1: d e     outputs: a b c d e
    noise     5 rows sampled on every rank, of which it keeps its own

With one generator (or none) for all prompts, diffusers samples noise for the whole batch at once. So does every rank
here, and keeps its rows: the image of a prompt depends neither on the number of ranks nor on the rank.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.info import images_each
from patchpar.shard.generators import refuse_shared
from patchpar.strategies.data.control_images import divided_conditions, listed_by_condition
from patchpar.strategies.data.known_pipelines import (
    CONTROLS,
    ENCODED_ONCE,
    ENCODES_EACH,
    MIXED,
    NEGATIVE_SIZES,
    OWN_NOISE,
    REFERENCES,
    REFERRED,
    REPEATS_EACH,
    why_mixed,
)

TEXTS = (  # and all names that begin so
    "prompt", "negative_prompt", "pooled_prompt", "negative_pooled_prompt", "lyrics", "transcription",
)  # fmt: skip
IMAGE_ARGUMENTS = (
    "image", "mask_image", "control_image", "control_mask", "original_image", "masked_image_latents", "video", "mask",
)  # fmt: skip
PER_PROMPT = (
    *IMAGE_ARGUMENTS, "generator", "latents", "class_labels", "image_embeds", "negative_image_embeds",
    "image_embeddings", "audio_latents", "prior_latents", "decoder_latents", "super_res_latents", "vae_latents",
    "clip_latents", "hint", "attention_mask", "negative_attention_mask", "encoder_attention_mask",
    "negative_encoder_attention_mask", "text_attention_mask", "generated_prompt_embeds",
    "negative_generated_prompt_embeds",
)  # fmt: skip
COUNTING = ("prompt", "prompt_embeds", "class_labels", "image")  # the first of these that was given counts
SHARED_LISTS = (
    "timesteps", "sigmas", "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end",
    "control_mode", "ip_adapter_image", "ip_adapter_image_embeds", "callback_on_step_end_tensor_inputs",
    "negative_ip_adapter_image", "negative_ip_adapter_image_embeds", "prior_callback_on_step_end_tensor_inputs",
    "gligen_boxes", "gligen_phrases", "gligen_images", "input_phrases_mask", "input_images_mask",
    "complex_human_instruction", "controlnet_frame_indices", "skip_guidance_layers", "original_size", "target_size",
    "crops_coords_top_left", "negative_original_size", "negative_target_size", "negative_crops_coords_top_left",
    "decode_timestep", "decode_noise_scale", "chunk_partition", "conditions", "guidance_keyframe_positions",
    "history_sizes", "keyframe_positions", "pyramid_num_inference_steps_list", "reference_conditions",
    "spatio_temporal_guidance_blocks", "conditioning_scale", "guidance_schedule",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Prompts `start` up to `stop` of `total`."""

    start: int
    stop: int
    total: int

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], rank: int, size: int) -> "PromptSlice":
        """Return the prompts of a pipeline call for `rank`. Raises PlanError if some rank would get none."""
        total = _count_prompts(kwargs)
        if total < size:
            given = "1 prompt" if total == 1 else f"{total} prompts"
            raise PlanError(
                f"the plan has data={size}, but this call has {given}: give a list of at least {size} prompts, or use "
                f"data={total} and another axis (cfg, patch) for the other devices"
            )
        each, more = divmod(total, size)
        start = rank * each + min(rank, more)
        return cls(start, start + each + (rank < more), total)

    def rows(self, count: int) -> slice:
        """Return our part of `count` rows that hold the same number for each prompt, in order."""
        per_prompt = count // self.total
        return slice(self.start * per_prompt, self.stop * per_prompt)


def split_call(kwargs: Mapping[str, Any], rank: int, size: int, pipe: Any = None) -> dict[str, Any]:
    """Return the arguments of a call of a diffusers pipeline for `rank` of `size`.

    Lists and tensors with one entry per prompt are divided, also with `num_images_per_prompt` entries per prompt, as
    lists of generators and latents have them. Raises PlanError where the prompt of an entry is unknown.
    """
    part, by_condition = PromptSlice.of(kwargs, rank, size), listed_by_condition(pipe, kwargs)
    _refuse_sizes_in_turn(pipe, kwargs)
    generators = kwargs.get("generator")
    if isinstance(generators, list):
        parts = [PromptSlice.of(kwargs, each, size).rows(len(generators)) for each in range(size)]
        refuse_shared(generators, parts)

    def divided(name: str, value: Any) -> Any:
        if name == "batch_size" and value == part.total:
            return part.stop - part.start
        if name == by_condition:
            return divided_conditions(pipe, name, value, part.total, lambda each: each[part.rows(len(each))])
        return _divided(name, value, part, kwargs)

    return {name: divided(name, value) for name, value in kwargs.items()}


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Return one output from those of all data ranks, in order: the pipeline's own class, or a tuple.

    Whole numbers that all ranks return, such as positions of frames, are for all prompts.
    """
    first = outputs[0]
    if is_dataclass(first):
        parts = {field.name: [getattr(output, field.name) for output in outputs] for field in fields(first)}
        make: Any = type(first)
        return make(**{name: merge_outputs(values) for name, values in parts.items()})
    if isinstance(first, tuple):
        return tuple(merge_outputs(parts) for parts in zip(*outputs, strict=True))
    if isinstance(first, list):
        return first if _are_for_all(outputs) else [item for output in outputs for item in output]
    if hasattr(first, "new_empty"):
        import torch

        return torch.cat([output.to(first.device) for output in outputs])
    if hasattr(first, "__array__"):
        import numpy as np

        return np.concatenate(outputs)
    return first


def _are_for_all(lists: Sequence[list[Any]]) -> bool:
    """Whether these are the same whole numbers; a bool, as of a safety checker, is of one result."""
    numbers = all(type(item) is int for each in lists for item in each)
    return numbers and all(each == lists[0] for each in lists)


@contextmanager
def as_one_call(pipe: Any, kwargs: Mapping[str, Any], rank: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments for `rank` of `size`; while open, noise and texts are our part of those of one call for all.

    Raises PlanError where the images of a part of the prompts would differ from those of one call for all.
    """
    from patchpar.strategies.data.noise import NoiseRows, no_tokens_sampled, noise_of_whole_batch  # needs torch
    from patchpar.strategies.data.text_encoding import TextArguments, encoded_together

    part, own_kwargs = PromptSlice.of(kwargs, rank, size), split_call(kwargs, rank, size, pipe)
    _refuse_what_depends_on_the_others(pipe, kwargs, part)
    _refuse_noise_in_turn(pipe, kwargs, is_one_each=part.total == size)
    own = part.stop - part.start
    texts = TextArguments(whole_call=kwargs, own_call=own_kwargs, own=own, total=part.total, rows=part.rows)
    with ExitStack() as stack:
        stack.enter_context(encoded_together(pipe, texts))
        given, each = kwargs.get("generator"), images_each(kwargs)
        rows = NoiseRows(pipeline=type(pipe).__name__, own=own, total=part.total, images=each, rows=part.rows)
        stack.enter_context(noise_of_whole_batch(given, rows))
        stack.enter_context(no_tokens_sampled(type(pipe).__name__))
        yield own_kwargs


def _count_prompts(kwargs: Mapping[str, Any]) -> int:
    for name in COUNTING:
        if kwargs.get(name) is not None:
            return _entries(name, kwargs[name]) or 1
    return kwargs.get("batch_size") or 1


def _entries(name: str, value: Any) -> int | None:
    """Return the number of entries of a list or tensor; None for a single item."""
    if isinstance(value, list):
        one_video = name == "video" and bool(value) and not isinstance(value[0], list) and not _dims(value[0]) > 3
        return None if one_video else len(value)
    least = 1 + 3 * (name in IMAGE_ARGUMENTS) + (name == "video")  # the dims of several: images are arrays themselves
    return len(value) if _dims(value) >= least else None


def _dims(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _divided(name: str, value: Any, part: PromptSlice, kwargs: Mapping[str, Any]) -> Any:
    count = _entries(name, value)
    if not count or name in SHARED_LISTS:
        return value
    images = images_each(kwargs)
    if name not in PER_PROMPT and not name.startswith(TEXTS):
        if count == part.total:
            raise PlanError(
                f"{name} is a {type(value).__name__.lower()} of {count} for {part.total} prompts: whether it holds one "
                "entry for each prompt is unknown, so it cannot be divided between data ranks. Use data=1 for this call"
            )
        return value
    if count in (part.total, part.total * images):
        return value[part.rows(count)]
    if count == 1 and name != "generator":
        return value
    each = f", or {images} for each" if images > 1 else ""
    raise PlanError(f"{name} has {count} entries for {part.total} prompts: give one for each prompt{each}")


def why_one_batch(pipe: Any) -> str:
    """Return why the prompts of this pipeline cannot be split; empty where they can."""
    scheduler, name = type(getattr(pipe, "scheduler", None)).__name__, type(pipe).__name__
    if name in MIXED:
        return f"{name} {MIXED[name]}"
    return f"{scheduler} samples noise for all of them by itself" if scheduler in OWN_NOISE else ""


def _refuse_what_depends_on_the_others(pipe: Any, kwargs: Mapping[str, Any], part: PromptSlice) -> None:
    why = why_one_batch(pipe)
    if why:
        way_out = "data=1" if type(pipe).__name__ in MIXED else "another scheduler, or data=1"
        raise PlanError(f"{why}, so that data ranks would give other images: use {way_out}")
    mixed = why_mixed(type(pipe).__name__, dir(pipe), kwargs)
    if mixed:
        raise PlanError(f"{mixed}, so that data ranks would give other results: use data=1 for this call")
    if type(pipe).__name__.startswith(REFERENCES):
        for name in REFERRED:
            if kwargs.get(name) is not None:
                raise PlanError(
                    f"{type(pipe).__name__} takes {name} as references for all prompts, not one for each: use data=1 "
                    "with it"
                )
    _refuse_images(pipe, kwargs, part)


def _refuse_noise_in_turn(pipe: Any, kwargs: Mapping[str, Any], *, is_one_each: bool) -> None:
    """Refuse inputs whose noise is sampled for one after another, or once for all prompts.

    Which numbers of a generator an input gets then depends on the inputs before it, and so does all noise that follows.
    Where each rank has one prompt, and samples on the CPU, it takes its row of as many numbers.
    """
    name, generator = type(pipe).__name__, kwargs.get("generator")
    given = next((each for each in ("image", "video") if kwargs.get(each) is not None), None)
    if given and name.startswith(ENCODES_EACH) and not isinstance(generator, list):
        device = getattr(pipe if generator is None else generator, "device", None)
        if not is_one_each or getattr(device, "type", None) != "cpu":
            raise PlanError(
                f"{name} encodes one {given} after another with noise of one generator, so that data ranks would give "
                "other results: give generator as a list of one for each prompt, or use data=1"
            )
    plain_frames = not getattr(getattr(pipe, "controlnet", None), "use_simplified_condition_embedding", True)
    for each in ENCODED_ONCE.get(name, ()):
        if kwargs.get(each) is not None and not plain_frames:
            raise PlanError(
                f"{name} encodes {each} once for all prompts, with noise of torch's own generator, so that data ranks "
                "would give other results: use data=1 with it"
            )


def _refuse_sizes_in_turn(pipe: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse sizes of their own for the branch without text, of pipelines whose method does not take them.

    Those repeat the pair of both branches for all prompts, and not each of the two: which prompt gets which size
    depends on the number of prompts.
    """
    if any(kwargs.get(name) is None for name in NEGATIVE_SIZES):
        return
    method = getattr(pipe, "_get_add_time_ids", None)
    if method is None or NEGATIVE_SIZES[0] not in inspect.signature(method).parameters:
        raise PlanError(
            f"{' and '.join(NEGATIVE_SIZES)}: diffusers gives these and the other sizes to prompts and branches in "
            "turn, so that data ranks would give other images: use data=1 with them"
        )


def _refuse_images(pipe: Any, kwargs: Mapping[str, Any], part: PromptSlice) -> None:
    """Refuse images whose results depend on the number of prompts in a call.

    One image for several prompts: some pipelines repeat it for every prompt before they encode it, others encode it
    once, with the first generator, which only the first rank has. Several results for each prompt: the images are
    repeated together [a b a b], and the prompts one by one [a a b b].
    """
    results, repeats_each = images_each(kwargs), type(pipe).__name__.startswith(REPEATS_EACH)
    guides_only = getattr(pipe, "controlnet", None) is not None and "control_image" not in kwargs
    guiding = listed_by_condition(pipe, kwargs) or ("image" if guides_only else "")
    for name in IMAGE_ARGUMENTS:
        if kwargs.get(name) is None or name == guiding:
            continue
        if _entries(name, kwargs[name]) != part.total:
            raise PlanError(
                f"one {name} for {part.total} prompts: the noise that it takes depends on the number of prompts in a "
                f"call, so that data ranks would give other images. Give {name} as a list of {part.total}, the same "
                f"{part.total} times if need be, or use data=1"
            )
        if results > 1 and name not in CONTROLS and not repeats_each:
            raise PlanError(
                f"{results} results for each prompt: {type(pipe).__name__} gives them the entries of {name} in turn, "
                "those of other prompts too, so that data ranks would give other images: use data=1, or one result for "
                f"each prompt, with every prompt and its {name} {results} times in the lists"
            )
