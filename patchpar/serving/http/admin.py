"""Routes of administrators: what each rank does, and an orderly end. They need a key of their own."""

from typing import Any

from fastapi import FastAPI

from patchpar.serving.service import ImageService


def add_admin(app: FastAPI, service: ImageService) -> None:
    """Add the routes."""

    @app.get("/admin/ranks")
    async def ranks() -> dict[str, Any]:
        """Return each rank's device, and whether it is free, busy or lost."""
        devices = service.generator.served.devices
        states = service.generator.ranks.states
        found = [
            {"rank": rank, "device": device, "state": state}
            for rank, (device, state) in enumerate(zip(devices, states, strict=True))
        ]
        return {"object": "list", "data": found}

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        """Accept no more requests; those that wait or run are finished. SIGTERM then ends the server."""
        service.stop_accepting()
        return {"status": service.state, "waiting": service.waiting}
