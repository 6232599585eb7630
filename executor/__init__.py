"""The real world: rollout and training engines, environments, workers, driver."""
