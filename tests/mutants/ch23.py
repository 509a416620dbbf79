"""Mistakes that the checkers of chapter 23 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "merge_pieces": [
        Mutant(
            "the finish reason goes first",
            replace=(
                "chunks.append((index, text[:most], None))",
                "chunks.append((index, text[:most], reasons[index]))",
            ),
            expect="A finish reason is sent with the last character",
        ),
        Mutant(
            "sends what is empty",
            replace=("elif text or reasons[index]:", "else:"),
            expect="Leave out a chunk without text",
        ),
        Mutant(
            "by number, not by arrival",
            replace=("for index, text in texts.items():", "for index, text in sorted(texts.items()):"),
            expect="in the order of each sample's first piece",
        ),
        Mutant(
            "an end without text is lost",
            replace=("elif text or reasons[index]:", "elif text:"),
            expect="merge_pieces: ",
        ),
        Mutant(
            "full is too full",
            replace=("if len(text) > most:", "if len(text) >= most:"),
            expect="merge_pieces: ",
        ),
        Mutant(
            "bytes",
            source="""
def merge_pieces(waiting, most):
    texts, reasons = {}, {}
    for index, text, reason in waiting:
        texts[index] = texts.get(index, "") + text
        reasons[index] = reason or reasons.get(index)
    chunks, rest = [], []
    for index, text in texts.items():
        now = text.encode()[:most].decode("utf-8", "ignore")
        if len(now) < len(text):
            chunks.append((index, now, None))
            rest.append((index, text[len(now):], reasons[index]))
        elif text or reasons[index]:
            chunks.append((index, text, reasons[index]))
    return chunks, rest
""",
            expect="counts characters, not bytes",
        ),
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
        Mutant(
            "decodes each piece by itself",
            replace=("self.decoder.decode(data)", 'data.decode("utf-8", "replace")'),
            expect="event_reader: ",
        ),
        Mutant("keeps the byte order mark", replace=('"utf-8-sig"', '"utf-8"'), expect="the codec utf-8-sig does it"),
        Mutant("strict", replace=('("replace")', '("strict")'), expect="raised UnicodeDecodeError"),
        Mutant(
            "CRLF in two pieces is two ends",
            replace=('text[self.after_cr and text[0] == "\\n" :]', "text"),
            expect="are still one line end",
        ),
        Mutant(
            "waits for the LF",
            source="""
class EventReader:
    def __init__(self):
        self.retry_ms, self.num_comments, self.is_done = None, 0, False
        self.decoder, self.rest = codecs.getincrementaldecoder("utf-8-sig")("replace"), ""
        self.data, self.type, self.id = [], "", ""

    def feed(self, data):
        text, events = self.rest + self.decoder.decode(data), []
        held = "\\r" if text.endswith("\\r") else ""
        *lines, rest = re.split("\\r\\n|\\r|\\n", text.removesuffix("\\r"))
        self.rest = rest + held
        for line in lines:
            if not self.is_done:
                read_line(self, line, events)
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
            expect="each end a line",
        ),
        Mutant(
            "every line end of Unicode",
            replace=(
                'lines = re.split("\\r\\n|\\r|\\n", text[self.after_cr and text[0] == "\\n" :])',
                (
                    'lines = [*text[self.after_cr and text[0] == "\\n" :].splitlines(), ""] '
                    'if text[-1] in "\\r\\n" else text[self.after_cr and text[0] == "\\n" :].splitlines() or [""]'
                ),
            ),
            expect="event_reader: edges",
        ),
        Mutant(
            "a type lasts",
            replace=('reader.data, reader.type = [], ""', "reader.data = []"),
            expect="A type lasts for one event",
        ),
        Mutant(
            "an id does not",
            replace=('reader.data, reader.type = [], ""', 'reader.data, reader.type, reader.id = [], "", ""'),
            expect="an id lasts until the next one",
        ),
        Mutant(
            "goes on after the end",
            replace=("if not self.is_done:", "if True:"),
            expect="nothing after it counts",
        ),
        Mutant(
            "the end has no type",
            replace=(
                'reader.is_done = reader.data == ["[DONE]"]',
                'reader.is_done = reader.data == ["[DONE]"] and not reader.type',
            ),
            expect="event_reader: edges",
        ),
        Mutant(
            "the end is anything that begins like it",
            replace=('reader.data == ["[DONE]"]', 'reader.data[:1] == ["[DONE]"]'),
            expect="event_reader: edges",
        ),
        Mutant(
            "strips all spaces",
            replace=('value = value.removeprefix(" ")', "value = value.strip()"),
            expect="event_reader: ",
        ),
        Mutant(
            "any digits", replace=('re.fullmatch("[0-9]+", value)', "value.isdigit()"), expect="the digits 0 to 9 alone"
        ),
        Mutant("any id", replace=('name == "id" and "\\0" not in value', 'name == "id"'), expect="event_reader: edges"),
        Mutant(
            "an event without data",
            replace=("if reader.data and not reader.is_done:", "if not reader.is_done:"),
            expect="event_reader: ",
        ),
        Mutant(
            "empty data is none",
            replace=("if reader.data and not reader.is_done:", "if any(reader.data) and not reader.is_done:"),
            expect="event_reader: ",
        ),
        Mutant(
            "copies the line for each byte",
            replace=("self.parts.append(lines[0])", "self.parts = [*''.join(self.parts), *lines[0]]"),
            expect="took more than",
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
        Mutant(
            "the claim until the end",
            replace=("self.left[name] = max(0, self.left[name] - count)", "pass"),
            expect="Computed tokens are not work",
        ),
        Mutant(
            "less than nothing",
            replace=("max(0, self.left[name] - count)", "self.left[name] - count"),
            expect="admission: ",
        ),
        Mutant(
            "a large request waits for ever",
            replace=("if not self.left or work", "if work"),
            expect="An empty server admits anything",
        ),
        Mutant(
            "no work is an empty server",
            replace=("if not self.left or work", "if not work or work"),
            expect="admission: ",
        ),
        Mutant(
            "remembers whom it refused",
            replace=(
                "        if not self.left or work + claim <= limit:\n            self.left[name] = claim\n            return 0\n",
                (
                    "        fits = not self.left or work + claim <= limit\n        self.left[name] = claim\n"
                    "        if fits:\n            return 0\n"
                ),
            ),
            expect="admission: ",
        ),
        Mutant(
            "the reserve is for all",
            replace=("(0 if urgent else self.reserve)", "0"),
            expect="The reserve is for urgent requests",
        ),
        Mutant(
            "fractions of a second",
            replace=("math.ceil(over / self.rate)", "over / self.rate"),
            expect="must be an int",
        ),
        Mutant(
            "rounds down",
            replace=("math.ceil(over / self.rate)", "int(over / self.rate)"),
            expect="rounded up to whole seconds",
        ),
        Mutant(
            "waits for what never comes",
            replace=("over = work if claim > limit else work + claim - limit", "over = work + claim - limit"),
            expect="Its claim alone exceeds the limit",
        ),
        Mutant(
            "zero seconds",
            replace=("max(1, math.ceil(over / self.rate))", "math.ceil(over / self.rate)"),
            expect="admission: ",
        ),
        Mutant(
            "the same name twice",
            replace=(
                "        if name in self.left:\n            raise ValueError",
                "        if False:\n            raise ValueError",
            ),
            expect="expected it to raise ValueError",
        ),
        Mutant("leaving twice", replace=("self.left.pop(name, None)", "self.left.pop(name)"), expect="raised KeyError"),
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
        Mutant(
            "every adapter there is",
            replace=("for slot in slots.unique().tolist():", "for slot in range(len(scales)):"),
            expect="nor over adapters that no token uses",
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
        Mutant(
            "the whole matrix",
            replace=("(x[rows] @ a[rank].T @ b[rank])", "(x[rows] @ (a[rank].T @ b[rank]))"),
            expect="as many as a whole [in, out] matrix has",
        ),
        Mutant("forgets the scale", replace=("scales[slot] * (", "("), expect="packed_lora: "),
        Mutant(
            "no adapter is the first one",
            replace=(
                "for slot in slots.unique().tolist():",
                "for slot in (slots := slots.clamp(min=0)).unique().tolist():",
            ),
            expect="its row is 0",
        ),
        Mutant(
            "one row too many",
            replace=("slice(starts[slot], starts[slot + 1])", "slice(starts[slot], starts[slot + 1] + 1)"),
            expect="packed_lora: ",
        ),
        Mutant(
            "always float32",
            replace=("x.new_zeros(x.shape[0], b.shape[1])", "torch.zeros(x.shape[0], b.shape[1])"),
            expect="packed_lora: edges",
        ),
    ],
    "repair_service": [
        Mutant(
            "only those that are sent to",
            replace=(
                (
                    "        for name in [name for name, client in self.clients.items() if client.is_gone]:\n"
                    "            end(self, name)\n"
                ),
                "",
            ),
            expect="check is_gone before the engine's step",
        ),
        Mutant(
            "left alone at the start",
            replace=(
                (
                    "        try:\n            client.start()\n        except BaseException:\n"
                    "            self.engine.release(name)\n            raise\n"
                ),
                "        client.start()\n",
            ),
            expect="then open must release the request that it has added",
        ),
        Mutant(
            "releases after the engine's step",
            source="""
class RepairedService:
    def __init__(self, engine):
        self.engine, self.clients = engine, {}

    def open(self, name, num_prompt, max_tokens, client):
        self.engine.add(name, num_prompt, max_tokens)
        try:
            client.start()
        except BaseException:
            self.engine.release(name)
            raise
        self.clients[name] = client

    def step(self):
        tokens = self.engine.step()
        for name in [name for name, client in self.clients.items() if client.is_gone]:
            end(self, name)
        for name, token, is_last in tokens:
            if name not in self.clients:
                continue
            try:
                self.clients[name].send(token)
            except OSError:
                is_last = True
            if is_last:
                end(self, name)


def end(service, name):
    del service.clients[name]
    service.engine.release(name)
""",
            expect="made an engine step before it released its request",
        ),
        Mutant(
            "expects connection errors only",
            replace=("except BaseException:", "except OSError:"),
            expect="raised RuntimeError, and the engine holds E",
        ),
        Mutant(
            "expects Exceptions only",
            replace=("except BaseException:", "except Exception:"),
            expect="raised CancelledError, and the engine holds E",
        ),
        Mutant(
            "only resets", replace=("except OSError:", "except ConnectionResetError:"), expect="raised TimeoutError"
        ),
        Mutant(
            "one error ends the step",
            replace=(
                "            except OSError:\n                is_last = True\n            if is_last:\n                end(self, name)\n",
                (
                    "            except OSError:\n                end(self, name)\n                return\n"
                    "            if is_last:\n                end(self, name)\n"
                ),
            ),
            expect="repair_service: ",
        ),
        Mutant(
            "ends twice",
            replace=("                is_last = True\n", "                end(self, name)\n"),
            expect="repair_service: ",
        ),
        Mutant(
            "swallows the error",
            replace=("            raise\n", "            return\n"),
            expect="expected it to raise ConnectionResetError",
        ),
        Mutant(
            "a step later",
            source="""
class RepairedService:
    def __init__(self, engine):
        self.engine, self.clients = engine, {}

    def open(self, name, num_prompt, max_tokens, client):
        self.engine.add(name, num_prompt, max_tokens)
        try:
            client.start()
        except BaseException:
            self.engine.release(name)
            raise
        self.clients[name] = client

    def step(self):
        for name in [name for name, client in self.clients.items() if client.is_gone]:
            self.end(name)
        for name, token, is_last in self.engine.step():
            try:
                self.clients[name].send(token)
            except OSError:
                continue
            if is_last:
                self.end(name)

    def end(self, name):
        del self.clients[name]
        self.engine.release(name)
""",
            expect="Release in the same step",
        ),
    ],
    "resume": [
        Mutant(
            "takes repeats for new",
            replace=("return place == len(said)", "return True"),
            expect="skip them, and compare them",
        ),
        Mutant(
            "believes every repeat",
            replace=("if place < len(said) and token != said[place]:", "if False:"),
            expect="resume: edges",
        ),
        Mutant(
            "overlooks gaps",
            replace=("if place > len(said):", "if False:"),
            expect="resume: edges",
        ),
        Mutant(
            "exhausted is complete",
            replace=(
                "                    yield token\n            finally:",
                "                    yield token\n                return\n            finally:",
            ),
            expect="resume: ",
        ),
        Mutant(
            "asks for the next id",
            replace=("connect(before - 1 if said else None)", "connect(before if said else None)"),
            expect="then the id of the last token that was yielded",
        ),
        Mutant(
            "never forgets a failure",
            replace=("failures = 0 if len(said) > before else failures + 1", "failures += len(said) == before"),
            expect="with f fruitless attempts in a row",
        ),
        Mutant(
            "waits without limit", replace=("min(30.0, 0.5 * 2**failures)", "0.5 * 2**failures"), expect="Sleep min(30"
        ),
        Mutant(
            "leaves connections open",
            replace=(
                "            finally:\n                connection.close()\n",
                "            finally:\n                pass\n",
            ),
            expect="Close each connection exactly once",
        ),
        Mutant(
            "closes only broken ones",
            replace=(
                "            finally:\n                connection.close()\n",
                "            except ConnectionError:\n                connection.close()\n                raise\n",
            ),
            expect="Close each connection exactly once",
        ),
        Mutant(
            "reads it all first",
            replace=("in connection:", "in list(connection):"),
            expect="resume: ",
        ),
        Mutant(
            "sleeps before it gives up",
            replace=(
                (
                    "        if failures == most_failures:\n"
                    '            raise ConnectionError(f"{failures} connections in a row brought nothing")\n'
                    "        sleep(min(30.0, 0.5 * 2**failures))\n"
                ),
                (
                    "        sleep(min(30.0, 0.5 * 2**failures))\n"
                    "        if failures == most_failures:\n"
                    '            raise ConnectionError(f"{failures} connections in a row brought nothing")\n'
                ),
            ),
            expect="the seconds that were slept",
        ),
    ],
}
