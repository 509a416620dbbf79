"""Drives a student's static buffers: steps of many sizes, copies that land late, an eye on every tensor.
Built in chapter 14."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case

PARTS = ("block_table", "seq_lens", "positions", "token_ids", "slot_mapping")


class Row(NamedTuple):
    """A sequence that decodes: the token to compute, its position, and its table, this step's block included."""

    token_id: int
    position: int
    blocks: list[int]


def step_input(rows: Sequence[Row], size: int, columns: int, block_size: int) -> dict[str, list]:
    """What the parts of the buffer hold, in their order."""
    fill = size - len(rows)
    return {
        "block_table": [[*row.blocks, *[0] * (columns - len(row.blocks))] for row in rows] + [[0] * columns] * fill,
        "seq_lens": [row.position + 1 for row in rows] + [0] * fill,
        "positions": [row.position for row in rows] + [0] * fill,
        "token_ids": [row.token_id for row in rows] + [0] * fill,
        "slot_mapping": [
            row.blocks[row.position // block_size] * block_size + row.position % block_size for row in rows
        ]
        + [-1] * fill,
    }


class _Watch(TorchDispatchMode):
    """Notes the first operation whose result lies in memory that is none of the known."""

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self.known, self.made = {tensor.untyped_storage().data_ptr() for tensor in known}, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() and out.untyped_storage().data_ptr() not in self.known:
            self.made = self.made or f"{func.__name__.split('.')[0]} of shape {list(out.shape)}"
        return out


class _Copy:
    """What a student's `fill` is handed: it is called inside of their code, so what it sees is told afterwards."""

    def __init__(self, trial: Trial):
        self.trial = trial

    def __call__(self, destination: Tensor, source: Tensor) -> None:
        self.trial.copied(destination, source)

    def __repr__(self) -> str:
        return "copy"


class Trial:
    """One set of buffers, and the steps that were put into it."""

    def __init__(self, case: Case, size: int, columns: int, block_size: int):
        self.case, self.size, self.columns, self.block_size = case, size, columns, block_size
        self.mine = case.run(case.student, size, columns, block_size)
        numbers = size * (columns + 4)
        hosts = self.mine.hosts
        case.equal(len(hosts), 2, "the number of host buffers")
        for name, tensor in (("on_device", self.mine.on_device), ("hosts[0]", hosts[0]), ("hosts[1]", hosts[1])):
            case.is_a(tensor, torch.int32, name)
            case.equal(
                tuple(tensor.shape), (numbers,), f"the shape of {name}", hint="One piece: size * (columns + 4) numbers."
            )
        own = [self.mine.on_device, *hosts]
        case.equal(
            len({tensor.data_ptr() for tensor in own}), 3, "the number of different buffers among on_device and hosts"
        )
        start = 0
        for name in PARTS:
            shape = (size, columns) if name == "block_table" else (size,)
            part = getattr(self.mine, name)
            case.is_a(part, torch.int32, name)
            case.equal(tuple(part.shape), shape, f"the shape of {name}")
            case.true(
                part.data_ptr() == self.mine.on_device.data_ptr() + 4 * start and part.is_contiguous(),
                f"{name} does not begin at number {start} of on_device",
                hint="The parts are views of on_device: block table first, then lengths, positions, tokens, KV slots.",
            )
            start += part.numel()
        self.addresses = self._addresses()
        self.steps: list[list[Row]] = []
        self.lists: list[list[list[int]]] = []
        self.on_its_way: tuple[Tensor, Tensor, int] | None = None
        self.source: int | None = None  # where the last step was copied from
        self.refused = False  # whether a step was refused since
        self.complaints: list[tuple[str, str]] = []
        self.watch = _Watch(own)

    def fill(self, rows: list[Row]) -> None:
        """A step: its host buffer is right when it is handed over, and still when it arrives."""
        case, self.copies = self.case, 0
        # The lists are the sequences' own, and change.
        self.steps.append([row._replace(blocks=list(row.blocks)) for row in rows])
        self.lists.append([row.blocks for row in rows])
        with self.watch:
            case.run(self.mine.fill, rows, _Copy(self), lend=True)
        self._tell()
        told = f"step {len(self.steps) - 1}, with {len(rows)} rows in buffers of {self.size}"
        case.equal(
            self.copies,
            1,
            f"the number of copies in {told}\n  the number of copies",
            hint="fill calls copy(self.on_device, host) once.",
        )
        case.true(
            self.watch.made is None,
            f"fill makes a new tensor in {told}: {self.watch.made}",
            hint=(
                "Write numbers into the tensors that are there: slices can be assigned numbers, "
                "host.numpy() lists, and a tensor that is recorded never changes its address."
            ),
        )
        case.true(
            self._addresses() == self.addresses,
            f"{told}: on_device, a part of it or a host buffer is another tensor than before",
            hint=(
                "A recorded graph reads the old address for ever. Write into a tensor; "
                "do not put another one in its place."
            ),
        )

    def refuses(self, rows: list[Row]) -> None:
        """Too many rows: an error, and nothing is touched."""
        buffers = [self.mine.on_device, *self.mine.hosts]
        before, self.copies = [tensor.clone() for tensor in buffers], 0
        self.case.raises(
            ValueError,
            self.mine.fill,
            rows,
            _Copy(self),
            hint=f"{len(rows)} rows do not fit into buffers of {self.size}.",
        )
        self.case.true(not self.copies, "fill called copy for a step that it refused")
        self.case.equal(
            buffers, before, "the buffers after a step that was refused", hint="Refuse it before you write."
        )
        self.refused = True

    def land(self) -> None:
        """The copy on its way arrives."""
        if self.on_its_way is not None:
            destination, source, step = self.on_its_way
            self.on_its_way = None
            destination.numpy()[:] = source.numpy()
            self._compare(destination, step, late=True)

    def finish(self) -> None:
        """The last copy arrives too."""
        self.land()
        self._tell()

    def copied(self, destination: Tensor, source: Tensor) -> None:
        """`copy` was called: the copy before is done, this one begins."""
        step = len(self.steps) - 1
        self.copies += 1
        whole, known = self.mine.on_device, [host.data_ptr() for host in self.mine.hosts]
        if destination.data_ptr() != whole.data_ptr() or destination.shape != whole.shape:
            return self._complain(
                "copy got a destination other than all of on_device",
                "One copy brings everything over: that is why it lies in one piece.",
            )
        if source.data_ptr() not in known or source.shape != whole.shape:
            return self._complain(
                "copy got a source that is none of the two host buffers, whole",
                "Write the step into hosts[0] or hosts[1], and hand that over.",
            )
        if source.data_ptr() == self.source:
            self._complain(
                f"step {step} was written into the same host buffer as step {step - 1}, whose copy may not have ended",
                "A step that is refused takes no turn: check the number of rows before you swap the buffers."
                if self.refused
                else "In turns: the copy of a step is only done when the next call of copy has returned.",
            )
        self.source, self.refused = source.data_ptr(), False
        self.land()
        self._compare(source, step, late=False)
        self.on_its_way = destination, source, step

    def _complain(self, message: str, hint: str) -> None:
        self.complaints.append((message, hint))

    def _tell(self) -> None:
        self.case.comparisons += 1
        for message, hint in self.complaints:
            self.case.fail(message, hint=hint)

    def _compare(self, tensor: Tensor, step: int, late: bool) -> None:
        got, expected = self._parts(tensor), self._expected(step)
        for name in PARTS:
            if got[name] == expected[name]:
                continue
            row = next(r for r in range(self.size) if got[name][r] != expected[name][r])
            mine, right, count = got[name][row], expected[name][row], len(self.steps[step])
            whose = (
                f"row {row} of step {step}"
                if row < count
                else f"row {row} of step {step}, which is padding ({count} rows),"
            )
            return self._complain(
                f"{name}: {whose} is {mine}; expected {right}{' when the copy arrived' if late else ''}",
                self._why(name, row, step, mine, late),
            )

    def _why(self, name: str, row: int, step: int, mine: object, late: bool) -> str:
        if late:
            return (
                "It was right when copy was called, and was changed before the copy was done: "
                "another step was written into it."
            )
        right = self._expected(step)[name][row]
        column = next((c for c in range(self.columns) if mine[c] != right[c]), 0) if name == "block_table" else None
        shown = lambda past: (
            self._expected(past)[name][row] if column is None else self._expected(past)[name][row][column]
        )
        mine = mine if column is None else mine[column]
        place = "there" if column is None else f"in column {column}"
        if (
            column is not None
            and step >= 2
            and all(
                row < len(lists) and lists[row] is self.lists[step][row] for lists in self.lists[step - 2 : step + 1]
            )
        ):
            return (
                "The table is the list that this row had before, and the list has changed since. "
                "To remember a table, copy what is in it."
            )
        if step >= 2 and mine == shown(step - 2):
            return (
                f"This is what step {step - 2} had {place}, the one before in this host buffer. "
                "What a buffer shows is two steps old, not one."
            )
        if step >= 1 and mine == shown(step - 1):
            return f"This is what step {step - 1} had {place}."
        if column is not None and not mine:
            return (
                "This block was never written into this host buffer. If the last step wrote it, "
                "then into the other one."
            )
        if row >= len(self.steps[step]):
            return "Rows of padding: KV slot -1, length 0, token 0, position 0, and a table of null blocks."
        table = (
            "A row's table ends with its last block; after it come null blocks, whatever an earlier request had there."
        )
        return (
            table
            if name == "block_table"
            else (
                "The length counts the token itself; its KV slot is block * block_size + offset, "
                "with the block of its position."
            )
        )

    def _expected(self, step: int) -> dict[str, list]:
        return step_input(self.steps[step], self.size, self.columns, self.block_size)

    def _parts(self, tensor: Tensor) -> dict[str, list]:
        numbers, table = tensor.numpy().tolist(), self.size * self.columns
        parts = {"block_table": [numbers[row * self.columns : (row + 1) * self.columns] for row in range(self.size)]}
        return parts | {
            name: numbers[table + i * self.size : table + (i + 1) * self.size] for i, name in enumerate(PARTS[1:])
        }

    def _addresses(self) -> list[int]:
        return [
            tensor.data_ptr() for tensor in (self.mine.on_device, *(getattr(self.mine, name) for name in PARTS))
        ] + sorted(host.data_ptr() for host in self.mine.hosts)
