"""Between a model file and a device: forecasts, the provider's options and reports, the report that a user sends.

The facts about the chips are in `jq.npu`, under whose name users find the functions of both.
"""
