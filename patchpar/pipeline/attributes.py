"""The pipeline's own methods and attributes: which act on all ranks, and which are refused, by name."""

from patchpar.errors import UnsupportedModel

ONE_COPY = "each worker holds a whole pipeline on its own device"
NOT_SAVED = "the workers' copies are not meant to be saved; save the pipeline before parallelising it"
NEW_PIPELINE = "it makes another pipeline; make that in this process and hand it to ParallelPipeline(pipe)"
NEW_NETWORK = "it makes another network; make that in this process and set it: pipe.vae = network"
NOT_IN_WORKERS = {
    "to": "devices= says where the pipeline runs, torch_dtype= in what",
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
    "to": "devices= says where it runs, torch_dtype= in what",
    "cuda": "devices= says where it runs",
    "cpu": "devices= says where it runs",
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
QUESTIONS = ("_repr_", "_ipython_", "_mime")  # of notebooks: methods that no pipeline has


def refuse_method(name: str, *, world_size: int) -> None:
    """Raise UnsupportedModel for a method that cannot act on all ranks."""
    if world_size > 1 and name in NOT_IN_WORKERS:
        raise UnsupportedModel(f"{name} is not for several devices: {NOT_IN_WORKERS[name]}")


def refuse_network_method(path: str) -> None:
    """Raise UnsupportedModel for a method of a network, such as "vae.to", that makes no sense for all ranks at once."""
    reason = NOT_OF_NETWORKS.get(path.rsplit(".", 1)[-1])
    if reason is not None:
        raise UnsupportedModel(f"pipe.{path} is not for networks in workers: {reason}")
