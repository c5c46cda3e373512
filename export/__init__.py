"""From a checkpoint to portable ONNX graphs and the `graphs.json` that describes them.

Runs where the model was made, with torch and transformers. Knows no engine, no gamma and no
context length of a deployment: those are chosen when a bundle is built.
"""
