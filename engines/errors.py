"""The errors a user can meet, as one tree.

    SpecExportError
    ├── MissingExtra           an optional dependency is not installed
    ├── CheckpointError        a checkpoint cannot be read: missing, cut, pickled, foreign code
    │   └── UnsupportedModel   it can be read, its architecture is not supported
    ├── PairError              target and draft do not fit together
    ├── ExportError            the graphs cannot be made
    │   └── ParityError        the exported graph does not compute what the checkpoint computes
    ├── BuildError             the exported graphs cannot be compiled as asked
    ├── BundleError            a bundle or exported directory cannot be trusted or read
    │   ├── SchemaError        its JSON is not what this version reads
    │   └── IntegrityError     a file is missing, altered or outside the directory
    ├── RequestError           a request does not fit the bundle (prompt, gamma, options)
    ├── EngineError            an engine failed while running
    │   └── NonFiniteError     the target produced NaN or infinity
    └── StorageError           the disk is full or cannot be written

A message gives what was found, what was expected, and the fix. The command line turns every
`SpecExportError` into one line and exit code 2.
"""

from __future__ import annotations


class SpecExportError(Exception):
    """Root of every error a user can meet."""


class MissingExtra(SpecExportError):
    """An optional dependency is not installed."""


class CheckpointError(SpecExportError):
    """A checkpoint cannot be read."""


class UnsupportedModel(CheckpointError):
    """The checkpoint is readable, its architecture or an option of it is not supported."""


class PairError(SpecExportError):
    """Target and draft do not fit together."""


class ExportError(SpecExportError):
    """The graphs cannot be made."""


class ParityError(ExportError):
    """The exported graph does not compute what the checkpoint computes."""


class BuildError(SpecExportError):
    """The exported graphs cannot be compiled as asked."""


class BundleError(SpecExportError):
    """A bundle or exported directory cannot be trusted or read."""


class SchemaError(BundleError):
    """The JSON of a bundle or exported directory is not what this version reads."""


class IntegrityError(BundleError):
    """A file of a bundle is missing, altered or outside the directory."""


class RequestError(SpecExportError):
    """A request does not fit the bundle."""


class EngineError(SpecExportError):
    """An engine failed while running."""


class NonFiniteError(EngineError):
    """The target produced NaN or infinity."""


class StorageError(SpecExportError):
    """The disk is full or cannot be written."""
