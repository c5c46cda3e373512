"""From portable ONNX graphs to a bundle, and from a bundle to something that can be called.

Runs on the device. Holds what every other folder may rely on (errors, formats, the engine
Protocols) and imports nothing of theirs: no tracing, no sampling, no sessions. Only building
needs onnx; opening a bundle and calling its engines does not.
"""
