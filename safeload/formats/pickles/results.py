"""From the machine's last value to the file's value: every leaf plain data or a tensor, every record whole."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import NoReturn

from safeload.errors import Finding, LimitError, PolicyError
from safeload.formats.pickles.constructors import describe, refuse, short_text
from safeload.formats.pickles.symbols import (
    OrderedMapping,
    Payload,
    PendingArray,
    PendingQuantized,
    PendingRecord,
    PendingTensor,
)
from safeload.policy import Policy, RecordRule
from safeload.tensors import Extent, RecordValue, TensorSpec, Value

MAX_NAME_CHARACTERS = 1024
"""Length of a tensor's name, all its components joined: some ten times that of the longest honest one. Without a
bound a long key would be copied into the name of every tensor below it."""


MAX_VIEWS_OF_A_BYTE = 16
"""How often, on average, a byte of a file's storages may be in tensors that are not the same view. Honest files come to
1 or 2 (a flat buffer and the parameters in it). Each view is written out where it is loaded or hashed. The payload of
an array is a storage as well: numpy writes one for each, and others may let many arrays share one."""

MAX_SPANS_OF_A_BYTE = 64
"""The same of the bytes from a view's first element to its last, which are read to hash the few among them that are the
view's. Honest files come to some tens, where a matrix is saved as that many slices of its columns."""

MAX_CROSSINGS = 1_000_000
"""How often a tensor may begin or end inside another, beyond `MAX_SPANS_OF_A_BYTE` times for each tensor. At each such
place the digests of all that are open there go on, at about a microsecond each."""


class Results:
    """One conversion. `tensors` fills up in stored order."""

    def __init__(self, policy: Policy) -> None:
        self.tensors: list[TensorSpec] = []
        self._policy = policy
        self._path: list[str] = []
        self._open: set[int] = set()  # containers that the current path goes through
        self._n_values = 0
        self._n_characters = 0
        self._storages: dict[object, int] = {}  # bytes of each storage or payload that a tensor is a view of
        self._views: dict[tuple[Extent, *tuple[object, ...]], int] = {}  # bytes of each view, when written out

    def convert(self, result: object, *, has_refusals: bool = False) -> Value:
        """Return the value that the file holds.

        Args:
            result: What the machine left at STOP.
            has_refusals: Whether the file is refused already, so that there is no value to speak of.

        Raises:
            RejectedError: Something in it is no data, is incomplete, breaks a record's rule or exceeds a limit.
        """
        if has_refusals:
            return None
        value = self._value(result)
        counted = Counter(tensor.name for tensor in self.tensors)
        if len(counted) != len(self.tensors):
            twice = counted.most_common(1)[0][0]
            refuse("ambiguous-name", f"each tensor has a name of its own, found {twice[:80]!r} twice", None)
        room = MAX_VIEWS_OF_A_BYTE * sum(self._storages.values()) + self._policy.limits.max_inline_bytes
        if sum(self._views.values()) > room:
            total = (
                f"{sum(self._views.values()):,} bytes of tensors in {sum(self._storages.values()):,} bytes of storages"
            )
            self._limit("max_inline_bytes", f"views of one another that come to {total}")
        self._check_spans()
        return value

    def _check_spans(self) -> None:
        """Refuse tensors that overlap so much that to hash them is out of proportion to what they hold."""
        spans = {(extent.offset, extent.nbytes) for extent, *_ in self._views if extent.nbytes}
        total = sum(nbytes for _, nbytes in spans)
        have = sum(self._storages.values())
        if total > MAX_SPANS_OF_A_BYTE * have + self._policy.limits.max_inline_bytes:
            spanned = f"{total:,} bytes from their first elements to their last, in {have:,} bytes of storages"
            self._limit("max_inline_bytes", f"strided views that come to {spanned}")
        ends = sorted({at for offset, nbytes in spans for at in (offset, offset + nbytes)})
        crossings = sum(bisect_left(ends, offset + n) - bisect_right(ends, offset) for offset, n in spans)
        if crossings > MAX_SPANS_OF_A_BYTE * len(spans) + MAX_CROSSINGS:
            raise LimitError(
                Finding(
                    "limit-exceeded",
                    f"expected tensors that lie apart, found {len(spans):,} that overlap in {crossings:,} places",
                    hint="save copies of the tensors: `tensor.clone()`",
                )
            )

    def _value(self, value: object) -> Value:
        self._n_values += 1
        if self._n_values > self._policy.limits.max_values:
            self._limit(
                "max_values", f"more than {self._policy.limits.max_values:,} values, shared ones counted each time"
            )
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is float or kind is str:
            return value  # type: ignore[return-value] # narrowed by exact type
        if kind is PendingArray:
            return self._tensor(value)  # type: ignore[arg-type]
        if kind is PendingTensor:
            return self._torch_tensor(value)  # type: ignore[arg-type]
        if kind is PendingQuantized:
            return self._quantized(value)  # type: ignore[arg-type]
        if kind is Payload:
            return self._bytes(value)  # type: ignore[arg-type]
        if kind in {list, tuple, dict, OrderedMapping, PendingRecord}:
            return self._container(value)
        return refuse("not-data", f"expected plain data, arrays and declared records, found {describe(value)}", None)

    def _container(self, value: object) -> Value:
        if id(value) in self._open:
            where = "/".join(self._path)[:80]
            refuse("cycle", f"a container may not contain itself, found one at {where!r}", None)
        if len(self._open) >= self._policy.limits.max_depth:
            self._limit("max_depth", f"containers nested more than {self._policy.limits.max_depth} deep")
        self._open.add(id(value))
        try:
            if type(value) is list:
                return [self._child(str(index), child) for index, child in enumerate(value)]
            if type(value) is tuple:
                return tuple(self._child(str(index), child) for index, child in enumerate(value))
            if isinstance(value, dict):
                return {key: self._child(str(key), child) for key, child in value.items()}
            return self._record(value)  # type: ignore[arg-type] # the only kind left
        finally:
            self._open.discard(id(value))

    def _child(self, name: str, value: object) -> Value:
        self._path.append(name)
        converted = self._value(value)
        self._path.pop()
        return converted

    def _name(self, array: PendingArray | PendingTensor) -> str:
        name = "/".join(self._path)
        if len(name) > MAX_NAME_CHARACTERS:
            refuse(
                "name-too-long",
                f"a tensor's name has at most {MAX_NAME_CHARACTERS} characters, found {len(name)}",
                array.offset,
            )
        self._n_characters += len(name)
        if self._n_characters > self._policy.limits.max_inline_bytes:
            self._limit("max_inline_bytes", f"{self._n_characters:,} characters in the names of tensors")
        return name

    def _tensor(self, array: PendingArray) -> TensorSpec:
        if array.extent is None or array.dtype is None:
            refuse("incomplete-array", "an array must get its state by BUILD, found none", array.offset)
        spec = TensorSpec(self._name(array), array.dtype, array.shape, array.order, array.extent)
        payload = array.extent.offset, array.extent.nbytes
        self._storages[payload] = array.extent.nbytes
        self._views[array.extent, spec.dtype, spec.shape, spec.order] = array.extent.nbytes
        self.tensors.append(spec)
        return spec

    def _torch_tensor(self, tensor: PendingTensor) -> TensorSpec:
        storage, itemsize = tensor.storage, tensor.dtype.itemsize
        assert storage.offset is not None  # noqa: S101 - its parser has found a place for each before
        extent = Extent(storage.offset + tensor.first * itemsize, tensor.span * itemsize)
        spec = TensorSpec(self._name(tensor), tensor.dtype, tensor.shape, tensor.order, extent, strides=tensor.strides)
        nbytes = spec.n_elements * itemsize
        if nbytes > max(storage.nbytes, self._policy.limits.max_inline_bytes):
            self._limit(
                "max_inline_bytes",
                f"a view of {nbytes:,} bytes that repeats those of a storage of {storage.nbytes:,}",
                tensor.offset,
            )
        self._storages[storage.key] = storage.nbytes
        self._views[extent, spec.dtype, spec.shape, spec.order, spec.strides] = nbytes
        self.tensors.append(spec)
        return spec

    def _quantized(self, tensor: PendingQuantized) -> RecordValue:
        fields = {"values": tensor.values, **tensor.parameters}
        return RecordValue("QuantizedTensor", {name: self._child(name, value) for name, value in fields.items()})

    def _bytes(self, payload: Payload) -> Value:
        if payload.kind == "bytes":
            return payload.extent
        text = short_text(payload)
        if text is None:
            refuse(
                "not-data",
                f"expected ASCII text, found a Python 2 {payload.kind} of {payload.extent.nbytes} bytes"
                if payload.kind == "str"
                else "expected plain data, found a bytearray",
                payload.extent.offset,
            )
        return text

    def _record(self, record: PendingRecord) -> RecordValue:
        rule = record.rule
        if record.fields is None:
            refuse("incomplete-record", f"a {rule.name} must get its fields by BUILD, found none", record.offset)
        fields: dict[str, Value] = {}
        for name, dtypes in rule.fields.items():
            value = self._child(name, record.fields[name])
            if not isinstance(value, TensorSpec):
                self._refuse_field(record, f"field {name} must be an array, found {describe(record.fields[name])}")
            if value.dtype.name not in dtypes or value.dtype.big_endian:
                self._refuse_field(record, f"field {name} must be {' or '.join(dtypes)}, found {value.dtype}")
            fields[name] = value
        self._check_scales(record, rule, fields)
        return RecordValue(rule.name, fields)

    def _check_scales(self, record: PendingRecord, rule: RecordRule, fields: dict[str, Value]) -> None:
        grouped = rule.grouped_scales
        if grouped is None:
            return
        weight, scales = fields[grouped.weight], fields[grouped.scales]
        assert isinstance(weight, TensorSpec) and isinstance(scales, TensorSpec)  # noqa: S101, PT018 - checked by the caller
        fits = len(weight.shape) == len(scales.shape) >= 2
        if fits:
            k, groups = weight.shape[-2], scales.shape[-2]
            same = weight.shape[:-2] == scales.shape[:-2] and weight.shape[-1] == scales.shape[-1]
            fits = same and (k == groups == 0 or (groups > 0 and k % groups == 0))
        if not fits:
            self._refuse_field(
                record,
                f"{grouped.scales} must be [.., G, N] for a {grouped.weight} [.., K, N] with G dividing K, "
                f"found {list(scales.shape)} for {list(weight.shape)}",
            )

    def _refuse_field(self, record: PendingRecord, message: str) -> NoReturn:
        raise PolicyError(
            Finding(
                "bad-record",
                f"{record.rule.name}: {message}",
                offset=record.offset,
                hint=f"the rule is [[pickle.records]] name = {record.rule.name!r} in policy {self._policy.name}",
            )
        )

    def _limit(self, name: str, asked: str, offset: int | None = None) -> NoReturn:
        raise LimitError(
            Finding(
                "limit-exceeded",
                asked,
                offset=offset,
                hint=self._policy.admits_by("[limits]", f"`{name}` with a larger number, if the file is honest"),
            )
        )
