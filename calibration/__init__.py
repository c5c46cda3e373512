"""From measurements on the device to a profile: is speculation worth it here, and with what gamma.

The room for prompt sets, for measuring acceptance (alpha), the cost of a draft step (cost_ratio)
and of a wider target pass (verify_cost), for the theory that joins them into an expected speed-up,
and for quantization scales and memory budgets. It may use export, engines and runtime, and none of
them imports it: what it finds goes back to a build as data (`profile.json`).
"""
