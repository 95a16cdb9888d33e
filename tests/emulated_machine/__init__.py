"""What kvplace does on machines of other shapes and kernels, booted under emulation."""
