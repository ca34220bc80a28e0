"""The guard: metrics of a step -> warn, tighten the correction, freeze the policy, stop the run. No torch, no Ray."""
