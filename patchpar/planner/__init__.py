"""Which plan to use. For now a stated rule; the planner proper takes its place."""
