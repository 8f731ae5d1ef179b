"""Programs of a model's ranks under plans, recorded once for all machines."""

from __future__ import annotations

from benchmarks.forecast.models import Model
from patchpar.pipeline.planner.forecast import AnyMachine, Forecast, PlanForecasts
from patchpar.pipeline.planner.image_ranks import ImageRanks, ranks_of_image
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.simulate import SimulatedSteps
from patchpar.plan.plan import Plan
from patchpar.plan.replay.price import ASSUMED, CostAssumptions


class RecordedModel:
    """A model and the ranks of the plans it was recorded under."""

    def __init__(self, model: Model) -> None:
        self._pipe, self._kwargs = model()
        self._pipe.set_progress_bar_config(disable=True)
        self._options = RecordOptions(joined=True)
        self._ranks: dict[Plan, ImageRanks] = {}

    def forecast(self, plan: Plan, machine: AnyMachine, steps: int, assumed: CostAssumptions = ASSUMED) -> Forecast:
        """Return the forecast of a call of so many steps, without encoders and VAE. Raises PlanError."""
        simulated = SimulatedSteps.of(plan)
        if plan not in self._ranks:
            options = self._options.with_steps(simulated.recorded)
            recording = Recording(self._pipe, simulated.plan, self._kwargs, options)
            self._ranks[plan] = ranks_of_image(simulated.plan, recording.of_rank)
        return PlanForecasts(
            self._ranks[plan],
            simulated.plan,
            machine,
            steps=steps,
            warm_up_steps=simulated.warm_up_steps,
            assumed=assumed,
        ).on()
