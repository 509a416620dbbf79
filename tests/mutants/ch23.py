"""Plausible mistakes in the exercises of chapter 23 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "merge_pieces": [
        Mutant(
            "works in its argument",
            source="""
def merge_pieces(waiting, most):
    texts, reasons = {}, {}
    while waiting:
        index, text, reason = waiting.pop(0)
        texts[index] = texts.get(index, "") + text
        reasons[index] = reason or reasons.get(index)
    chunks = [(i, t[:most], None if t[most:] else reasons[i]) for i, t in texts.items() if t or reasons[i]]
    return chunks, [(i, t[most:], reasons[i]) for i, t in texts.items() if t[most:]]
""",
            expect="changed one of its arguments",
        ),
    ],
    "event_reader": [
        edited("strict", '("replace")', '("strict")', "raised UnicodeDecodeError"),
        edited(
            "CRLF in two pieces is two ends",
            'text[self.after_cr and text[0] == "\\n" :]',
            "text",
            "are still one line end",
        ),
        edited(
            "every line end of Unicode",
            'lines = re.split("\\r\\n|\\r|\\n", text[self.after_cr and text[0] == "\\n" :])',
            'lines = [*text[self.after_cr and text[0] == "\\n" :].splitlines(), ""] '
            'if text[-1] in "\\r\\n" else text[self.after_cr and text[0] == "\\n" :].splitlines() or [""]',
            "event_reader: edges",
        ),
        edited(
            "copies the line for each byte",
            "self.parts.append(lines[0])",
            "self.parts = [*''.join(self.parts), *lines[0]]",
            "took more than",
        ),
        Mutant(
            "copies the rest for each line",
            source="""
class EventReader:
    def __init__(self):
        self.retry_ms, self.num_comments, self.is_done = None, 0, False
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self.text, self.after_cr, self.parts = "", False, []
        self.data, self.type, self.id = [], "", ""

    def feed(self, data):
        text, events = self.decoder.decode(data), []
        if text:
            text, self.after_cr = text[self.after_cr and text[0] == "\\n" :], text[-1] == "\\r"
        self.parts.append(text)
        if not re.search("[\\r\\n]", text):
            return events
        text = "".join(self.parts)
        while match := re.search("\\r\\n|\\r|\\n", text):
            line, text = text[: match.start()], text[match.end() :]
            if not self.is_done:
                read_line(self, line, events)
        self.parts = [text]
        return events


def read_line(reader, line, events):
    name, _, value = line.partition(":")
    value = value.removeprefix(" ")
    if not line:
        reader.is_done = reader.data == ["[DONE]"]
        if reader.data and not reader.is_done:
            events.append(Event(reader.type or "message", "\\n".join(reader.data), reader.id))
        reader.data, reader.type = [], ""
    elif not name:
        reader.num_comments += 1
    elif name == "data":
        reader.data.append(value)
    elif name == "event":
        reader.type = value
    elif name == "id" and "\\0" not in value:
        reader.id = value
    elif name == "retry" and re.fullmatch("[0-9]+", value):
        reader.retry_ms = int(value)
""",
            expect="took more than",
        ),
    ],
    "admission": [
        edited("zero seconds", "max(1, math.ceil(over / self.rate))", "math.ceil(over / self.rate)", "admission: "),
        edited("fractions of a second", "math.ceil(over / self.rate)", "over / self.rate", "a float, not an int"),
        edited("leaving twice", "self.left.pop(name, None)", "self.left.pop(name)", "raised KeyError"),
    ],
    "packed_lora": [
        Mutant(
            "token by token",
            source="""
def packed_lora(x, a, b, starts, scales, slots):
    out = x.new_zeros(x.shape[0], b.shape[1])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rank = slice(starts[slot], starts[slot + 1])
            out[row] = scales[slot] * (x[row] @ a[rank].T @ b[rank])
    return out
""",
            expect="never over its tokens",
        ),
        edited(
            "every adapter there is",
            "for slot in slots.unique().tolist():",
            "for slot in range(len(scales)):",
            "nor over adapters that no token uses",
        ),
        Mutant(
            "masks too late",
            source="""
def packed_lora(x, a, b, starts, scales, slots):
    owner = torch.cat([torch.full((starts[i + 1] - starts[i],), i) for i in range(len(scales))] + [slots[:0]])
    factor = torch.tensor([*scales, 0.0], dtype=x.dtype)[owner.long()]
    mask = (slots[:, None] == owner[None]).to(x.dtype) * factor
    return (x @ a.T * mask) @ b
""",
            expect="0 times NaN is NaN",
        ),
        edited(
            "the whole matrix",
            "(x[rows] @ a[rank].T @ b[rank])",
            "(x[rows] @ (a[rank].T @ b[rank]))",
            "as many as a whole [in, out] matrix has",
        ),
        edited(
            "always float32",
            "x.new_zeros(x.shape[0], b.shape[1])",
            "torch.zeros(x.shape[0], b.shape[1])",
            "packed_lora: edges",
        ),
    ],
    "repair_service": [
        edited("only resets", "except OSError:", "except ConnectionResetError:", "raised TimeoutError"),
        edited(
            "ends twice", "                is_last = True\n", "                end(self, name)\n", "repair_service: "
        ),
    ],
    "resume": [
        edited(
            "closes only broken ones",
            "            finally:\n                connection.close()\n",
            "            except ConnectionError:\n                connection.close()\n                raise\n",
            "Close each connection exactly once",
        ),
        edited(
            "leaves connections open",
            "            finally:\n                connection.close()\n",
            "            finally:\n                pass\n",
            "Close each connection exactly once",
        ),
    ],
}
