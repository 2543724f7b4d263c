"""Grok-1: a drop-in for the published `checkpoint.py`, and which file holds which parameter.

`restore`, `load_tensors`, `replace_with_load_state`, `fast_unpickle`, `fast_pickle`, `path_tuple_to_string`,
`get_load_path_str`, `copy_to_shm` and `copy_from_shm` take what the published functions of these names take. Those that
read a checkpoint need a manifest and trusted keys besides, by keyword. Importing this loads no JAX.
"""

from __future__ import annotations

from safeload.formats.pickles.writing import shard_file
from safeload.grok1.layout import (
    CHECKPOINT_FOLDER,
    PARTITION_RULES,
    ROW_PARALLEL_GROUPS,
    TENSORS_BEFORE_LAYERS,
    TENSORS_PER_LAYER,
    GrokConfig,
    Partition,
    Shard,
    name_shards,
    parameter_names,
    shard_table,
)
from safeload.grok1.published import (
    copy_from_shm,
    copy_to_shm,
    fast_pickle,
    fast_unpickle,
    get_load_path_str,
    load_tensors,
    path_tuple_to_string,
    replace_with_load_state,
)
from safeload.grok1.restoring import enable_compilation_cache, restore
from safeload.records import QuantizedWeight8bit

__all__ = [
    "CHECKPOINT_FOLDER",
    "PARTITION_RULES",
    "ROW_PARALLEL_GROUPS",
    "TENSORS_BEFORE_LAYERS",
    "TENSORS_PER_LAYER",
    "GrokConfig",
    "Partition",
    "QuantizedWeight8bit",
    "Shard",
    "copy_from_shm",
    "copy_to_shm",
    "enable_compilation_cache",
    "fast_pickle",
    "fast_unpickle",
    "get_load_path_str",
    "load_tensors",
    "name_shards",
    "parameter_names",
    "path_tuple_to_string",
    "replace_with_load_state",
    "restore",
    "shard_file",
    "shard_table",
]
