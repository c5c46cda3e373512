"""Export a target and a draft model to ONNX, compile them into engines, decode speculatively.

    checkpoint --export--> exported/ --engines--> bundle/ --runtime--> tokens, statistics

`spec_export.export` makes portable graphs, `spec_export.engines` compiles them into a bundle,
`spec_export.runtime` runs one, `spec_export.calibration` measures what it is worth. Importing this
package imports none of them: each is imported by who uses it, so that running a bundle needs
numpy, a tokenizer and one engine library, and nothing a model was made with.
"""

from importlib.metadata import version

__version__ = version("spec-export")
