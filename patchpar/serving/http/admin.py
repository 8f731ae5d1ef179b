"""Routes of administrators: what each rank does, LoRAs, and an orderly end. They need a key of their own."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from patchpar.serving.admin_bodies import parse_lora, parse_rank, rank_of
from patchpar.serving.http.job_outcome import outcome_of
from patchpar.serving.http.request_body import read_body
from patchpar.serving.service import ImageService


def add_admin(app: FastAPI, service: ImageService) -> None:
    """Add the routes."""

    def listed() -> dict[str, Any]:
        devices = service.generator.served.devices
        states = service.generator.ranks.states
        found = [
            {"rank": rank, "device": device, "state": state}
            for rank, (device, state) in enumerate(zip(devices, states, strict=True))
        ]
        return {"object": "list", "data": found}

    @app.get("/admin/ranks")
    async def ranks() -> dict[str, Any]:
        """Return each rank's device, and whether it is free, busy, silent, lost or removed."""
        return listed()

    _add_ranks(app, service, listed)
    _add_loras(app, service)

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        """Accept no more requests; those that wait or run are finished. SIGTERM then ends the server."""
        service.stop_accepting()
        return {"status": service.state, "waiting": service.waiting}


def _add_ranks(app: FastAPI, service: ImageService, listed: Callable[[], dict[str, Any]]) -> None:
    @app.post("/admin/ranks")
    async def put_back(request: Request) -> dict[str, Any]:
        """Start a removed rank again, once what runs has ended."""
        rank = parse_rank(await read_body(request, service.settings.limits.body_bytes))
        await outcome_of(service.put_back_rank(rank), request)
        return listed()

    @app.delete("/admin/ranks/{rank}")
    async def remove(request: Request, rank: str) -> dict[str, Any]:
        """End a rank's worker, once what runs has ended, so that its device is free for others."""
        await outcome_of(service.remove_rank(rank_of(rank)), request)
        return listed()


def _add_loras(app: FastAPI, service: ImageService) -> None:
    def listed() -> dict[str, Any]:
        found = [{"name": each.name, "scale": each.scale} for each in service.generator.loras.loras]
        return {"object": "list", "data": found}

    @app.get("/admin/lora")
    async def loras() -> dict[str, Any]:
        """List the registered LoRAs."""
        return listed()

    @app.post("/admin/lora")
    async def add(request: Request) -> dict[str, Any]:
        """Register a LoRA of a file or a folder on this machine, once what runs has ended."""
        lora = parse_lora(await read_body(request, service.settings.limits.body_bytes))
        service.loras.check_new(lora.name)  # before all else has to wait for it
        await outcome_of(service.add_lora(lora), request)
        return listed()

    @app.delete("/admin/lora/{name}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Delete a LoRA, once what runs has ended. Requests that wait for it fail."""
        service.loras.check_known(name)
        await outcome_of(service.remove_lora(name), request)
        return listed()
