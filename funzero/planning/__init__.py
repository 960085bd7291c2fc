"""The planner: bytes and volumes of a step in any layout, worked out without a device, processes or global-size memory."""
