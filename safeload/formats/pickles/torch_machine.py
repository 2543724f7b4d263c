"""The pickle machine for PyTorch's files: the same, and it knows storages and the calls that make views of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from safeload.errors import Finding, PolicyError
from safeload.formats import Source
from safeload.formats.pickles.constructors import Constructor, describe, refuse, short_text
from safeload.formats.pickles.machine import Machine
from safeload.formats.pickles.symbols import REFUSED, OrderedMapping, Storage
from safeload.formats.pickles.torch_constructors import ALL_CONSTRUCTORS, UNTYPED, advice, storage_type
from safeload.policy import Policy

_BINPERSID = ord("Q")

_LOCATION = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,5})?")
"""A device as PyTorch names it: `cpu`, `cuda:0`."""

MAX_KEY_CHARACTERS = 64
"""Length of a storage's key: a counter in zip files, a memory address in older ones."""

_BIGGEST = (1 << 63) - 1


class TorchMachine(Machine):
    """One run over one pickle of a PyTorch file.

    Persistent ids are taken for storages, and for nothing else. `storages` fills up in order of first use.
    """

    constructors: ClassVar[Mapping[tuple[str, str], tuple[Constructor | None, range]]] = ALL_CONSTRUCTORS

    def __init__(
        self, source: Source, policy: Policy, *, first: int = 0, is_legacy: bool = False, is_last: bool = True
    ) -> None:
        """Get ready to run.

        Args:
            source: The file's bytes up to the end of this pickle, or of the file where others follow.
            policy: What is allowed, and the limits.
            first: Byte offset at which the pickle begins.
            is_legacy: Whether persistent ids have the form of the files of several pickles.
            is_last: Whether the source ends with this pickle.
        """
        super().__init__(source, policy, first=first)
        self.storages: dict[str, Storage] = {}
        self.attributes: list[object] = []
        self.end = first
        self._is_legacy = is_legacy
        self._is_last = is_last

    def _handlers(self, newest: int) -> tuple[object, ...]:  # type: ignore[override] # its handlers take this class
        plain = super()._handlers(newest)
        if newest < 1:
            return plain
        return (*plain[:_BINPERSID], TorchMachine._binpersid, *plain[_BINPERSID + 1 :])

    def _advice(self, full: str) -> str | None:
        return advice(full) or super()._advice(full)

    def _check_end(self, end: int) -> None:
        self.end = end
        if self._is_last:
            super()._check_end(end)

    def _binpersid(self) -> None:
        """Replace a persistent id by its storage (`persistent_id` in torch/serialization.py)."""
        pid = self._pop()
        if pid is REFUSED or (type(pid) is tuple and any(part is REFUSED for part in pid)):
            self._push(REFUSED)
            return
        if type(pid) is not tuple or not pid:
            self._fail("bad-persistent-id", f"a persistent id is a tuple that names a storage, found {describe(pid)}")
        kind = short_text(pid[0])
        if kind == "module":
            raise PolicyError(
                Finding(
                    "pytorch-module",
                    "expected tensors, found the class of a model with its source code",
                    offset=self._start,
                    hint="save `model.state_dict()` instead of the model",
                )
            )
        wanted = 6 if self._is_legacy else 5
        if kind != "storage" or len(pid) != wanted or (self._is_legacy and pid[5] is not None):
            shape = "('storage', class, key, location, number of elements" + (", None)" if self._is_legacy else ")")
            self._fail("bad-persistent-id", f"a persistent id is exactly {shape}, found {describe(pid)}")
        self._push(self._storage(pid))

    def _storage(self, pid: tuple[object, ...]) -> Storage:
        key, location, n_elements = short_text(pid[2]), short_text(pid[3]), pid[4]
        name, itemsize = storage_type(pid[1], self._start)
        if self._is_legacy and name == UNTYPED:
            hint = "PyTorch itself cannot read it; save it in the zip format"
            self._fail("bad-storage", "a storage in a file of several pickles has a type, found an untyped one", hint)
        if key is None or not 0 < len(key) <= MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
            self._fail("bad-persistent-id", f"a storage's key is a short ASCII string, found {describe(pid[2])}")
        if location is None or not _LOCATION.fullmatch(location):
            self._fail("bad-persistent-id", f"a storage's location names a device, found {describe(pid[3])}")
        if location.startswith("meta"):
            self._fail("bad-persistent-id", "a storage has data, found one on the meta device", advice(_META))
        if type(n_elements) is not int or not 0 <= n_elements * itemsize <= _BIGGEST:
            self._fail("bad-persistent-id", f"a storage has a number of elements, found {describe(n_elements)}")
        known = self.storages.get(key)
        if known is None:
            self._store(1)
            known = self.storages[key] = Storage(key, name, location, n_elements, itemsize)
        elif (known.type_name, known.location, known.n_elements) != (name, location, n_elements):
            # PyTorch goes by what it saw first, and so reads the same bytes as another type than is said here.
            self._fail("storage-differs", f"storage {key!r} is described alike each time, found two descriptions of it")
        return known

    def _build_other(self, target: object, state: object) -> None:
        """Take the attribute that a module gives to its state dict: versions, and no tensors."""
        if type(target) is not OrderedMapping:
            super()._build_other(target, state)
            return
        if target.has_attributes or target.is_sealed or type(state) is not dict or set(state) != {"_metadata"}:
            refuse(
                "bad-state",
                f"an OrderedDict has at most one state with `_metadata`, found {describe(state)}",
                self._start,
            )
        target.has_attributes = True
        self._store(1)
        self.attributes.append(state)


_META = "torch._utils._rebuild_meta_tensor_no_storage"
