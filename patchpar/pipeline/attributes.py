"""Methods of pipelines and networks that cannot act on all ranks, with the reason and the alternative."""

from patchpar.errors import UnsupportedModel

ONE_COPY = "each worker holds a whole pipeline on its own device"
NOT_SAVED = "the workers' copies are not meant to be saved; save the pipeline before parallelising it"
NEW_PIPELINE = "it creates another pipeline; create that in this process and pass it to ParallelPipeline(pipe)"
NEW_NETWORK = "it creates another network; create that in this process and set it: pipe.vae = network"
NOT_IN_WORKERS = {
    "to": "pass devices= for the devices and torch_dtype= for the dtype",
    "enable_model_cpu_offload": ONE_COPY,
    "enable_sequential_cpu_offload": ONE_COPY,
    "enable_group_offload": "call it of a network, which acts on all ranks: pipe.transformer.enable_group_offload(...)",
    "reset_device_map": ONE_COPY,
    "save_pretrained": NOT_SAVED,
    "save_lora_weights": NOT_SAVED,
    "push_to_hub": NOT_SAVED,
    "from_pipe": NEW_PIPELINE,
    "from_single_file": NEW_PIPELINE,
    "download": "it fetches a model and needs no ranks; call it on the pipeline's class",
}
NOT_OF_NETWORKS = {
    "to": "pass devices= for the devices and torch_dtype= for the dtype",
    "cuda": "pass devices= for the devices",
    "cpu": "pass devices= for the devices",
    "save_pretrained": NOT_SAVED,
    "push_to_hub": NOT_SAVED,
    "from_pretrained": NEW_NETWORK,
    "from_single_file": NEW_NETWORK,
    "from_config": NEW_NETWORK,
    "enable_parallelism": "it is parallel already, by the plan",
    "parameters": "weights do not leave the workers",
    "named_parameters": "weights do not leave the workers",
    "modules": "modules do not leave the workers",
    "named_modules": "modules do not leave the workers",
    "children": "modules do not leave the workers",
    "named_children": "modules do not leave the workers",
}
QUESTIONS = ("_repr_", "_ipython_", "_mime")  # prefixes of names that notebooks look up; no pipeline has them


def refuse_method(name: str, *, world_size: int) -> None:
    """Raise UnsupportedModel for a method that cannot act on all ranks."""
    if world_size > 1 and name in NOT_IN_WORKERS:
        raise UnsupportedModel(f"{name} is not for several devices: {NOT_IN_WORKERS[name]}")


def refuse_network_method(path: str) -> None:
    """Raise UnsupportedModel for a method of a network, such as "vae.to", that cannot act on all ranks."""
    reason = NOT_OF_NETWORKS.get(path.rsplit(".", 1)[-1])
    if reason is not None:
        raise UnsupportedModel(f"pipe.{path} is not for networks in workers: {reason}")
