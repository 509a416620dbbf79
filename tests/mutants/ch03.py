"""Plausible mistakes in the exercises of chapter 03: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "cache_bytes": [
        Mutant(
            "lets a missing entry pass, but not a null one",
            replace=('config.get("num_key_value_heads") or heads', 'config.get("num_key_value_heads", heads)'),
            expect="raised TypeError",
        ),
        Mutant(
            "takes a null head_dim for a number",
            replace=(
                'config.get("head_dim") or config["hidden_size"] // heads',
                'config.get("head_dim", config["hidden_size"] // heads)',
            ),
            expect="head_dim is null in this file",
        ),
        Mutant("a float", replace=("return kept * 2", "return kept * 2.0"), expect="a float, not an int"),
    ],
    "doubling_cache": [
        Mutant("no causal mask inside the chunk", replace=("attn_mask=mask, ", ""), expect="without a causal mask"),
        Mutant(
            "the mask of a cache that was empty",
            replace=(".tril(self.length - q.shape[0])", ".tril()"),
            expect="was taken to stand at position i",
        ),
        Mutant(
            "doubles once",
            replace=("        while capacity < end:", "        if capacity < end:"),
            expect="more than one doubling",
        ),
        Mutant(
            "grows to what is needed, no further",
            replace=("            capacity *= 2", "            capacity = end"),
            expect="the shape of keys after 3 positions",
        ),
        Mutant(
            "returns what it stores in",
            replace=("        self.length = end\n", "        self.length = end\n        return self.keys\n"),
            expect="it returns nothing",
        ),
        Mutant(
            "grows and starts empty",
            replace=(
                "F.pad(self.keys, more), F.pad(self.values, more)",
                "torch.zeros_like(F.pad(self.keys, more)), torch.zeros_like(F.pad(self.values, more))",
            ),
            expect="keys[:, :",
        ),
        Mutant(
            "attends over the whole capacity",
            source="""
class DoublingCache:
    def __init__(self, num_kv_heads, head_dim, capacity):
        self.keys, self.values, self.length = torch.zeros(num_kv_heads, capacity, head_dim), torch.zeros(num_kv_heads, capacity, head_dim), 0

    def append(self, k, v):
        end, capacity = self.length + k.shape[0], self.keys.shape[1]
        while capacity < end:
            capacity *= 2
        for name, new in (("keys", k), ("values", v)):
            old = getattr(self, name)
            grown = old if capacity == old.shape[1] else F.pad(old, (0, 0, 0, capacity - old.shape[1]))
            grown[:, self.length:end] = new.transpose(0, 1)
            setattr(self, name, grown)
        self.length = end

    def attend(self, q):
        mask = torch.ones(q.shape[0], self.keys.shape[1], dtype=torch.bool).tril(self.length - q.shape[0])
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], self.keys[None], self.values[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)
""",
            expect="slots that hold no valid position were read",
        ),
        Mutant(
            "deals the heads out in turn",
            replace=(
                "q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)",
                "q.transpose(0, 1)[None], keys.repeat(q.shape[1] // len(keys), 1, 1)[None], values.repeat(q.shape[1] // len(keys), 1, 1)[None], attn_mask=mask)",
            ),
            expect="not h % num_kv_heads",
        ),
        Mutant(
            "a new tensor for every token",
            replace=(
                "        if capacity > self.keys.shape[1]:\n",
                "        self.keys, self.values = self.keys.clone(), self.values.clone()\n        if capacity > self.keys.shape[1]:\n",
            ),
            expect="although there was room",
        ),
        Mutant(
            "remembers everything a second time",
            source="""
class DoublingCache:
    def __init__(self, num_kv_heads, head_dim, capacity):
        self.keys, self.values, self.length = torch.zeros(num_kv_heads, capacity, head_dim), torch.zeros(num_kv_heads, capacity, head_dim), 0
        self.all_keys = self.all_values = torch.zeros(num_kv_heads, 0, head_dim)

    def append(self, k, v):
        end, capacity = self.length + k.shape[0], self.keys.shape[1]
        while capacity < end:
            capacity *= 2
        if capacity > self.keys.shape[1]:
            more = (0, 0, 0, capacity - self.keys.shape[1])
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)
        self.keys[:, self.length:end], self.values[:, self.length:end] = k.transpose(0, 1), v.transpose(0, 1)
        self.all_keys, self.all_values = torch.cat([self.all_keys, k.transpose(0, 1)], 1), torch.cat([self.all_values, v.transpose(0, 1)], 1)
        self.length = end

    def attend(self, q):
        mask = torch.ones(q.shape[0], self.length, dtype=torch.bool).tril(self.length - q.shape[0])
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], self.all_keys[None], self.all_values[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)
""",
            expect="the output does not follow",
        ),
    ],
    "ring_cache": [
        Mutant(
            "writes before it attends",
            source="""
class RingCache:
    def __init__(self, window, num_kv_heads, head_dim):
        self.keys, self.values = torch.zeros(window, num_kv_heads, head_dim), torch.zeros(window, num_kv_heads, head_dim)
        self.window, self.length = window, 0

    def positions(self):
        return [max((p for p in range(self.length) if p % self.window == slot), default=-1) for slot in range(self.window)]

    def step(self, q, k, v):
        new = torch.arange(self.length, self.length + len(k))
        kept = new[-self.window:]
        self.keys[kept % self.window], self.values[kept % self.window] = k[-self.window:], v[-self.window:]
        self.length += len(k)
        held = torch.arange(max(0, self.length - self.window), self.length)
        distance = new[:, None] - held
        return masked_attention(q, self.keys[held % self.window], self.values[held % self.window], (distance >= 0) & (distance < self.window))
""",
            expect="attend before you write",
        ),
        Mutant(
            "sees one position too many",
            replace=("(distance < self.window)", "(distance <= self.window)"),
            expect="one too long",
        ),
        Mutant(
            "sees one position too few",
            replace=("(distance < self.window)", "(distance < max(1, self.window - 1))"),
            expect="one too short",
        ),
        Mutant(
            "keeps the head of a long chunk",
            replace=(
                (
                    "        kept = new[-self.window:]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
                    "k[-self.window:], v[-self.window:]"
                ),
                (
                    "        kept = new[:self.window]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
                    "k[:self.window], v[:self.window]"
                ),
            ),
            expect="the key and value in slot",
        ),
        Mutant(
            "reads slots that are empty yet",
            source="""
class RingCache:
    def __init__(self, window, num_kv_heads, head_dim):
        self.keys, self.values = torch.zeros(window, num_kv_heads, head_dim), torch.zeros(window, num_kv_heads, head_dim)
        self.window, self.length, self.held = window, 0, [-1] * window

    def positions(self):
        return self.held

    def step(self, q, k, v):
        outs = []
        for i in range(len(k)):
            slot = self.length % self.window
            self.keys[slot], self.values[slot], self.held[slot] = k[i], v[i], self.length
            self.length += 1
            outs.append(masked_attention(q[i:i + 1], self.keys, self.values, torch.ones(1, self.window, dtype=torch.bool)))
        return torch.cat(outs)
""",
            expect="ring_cache: e",
        ),
        Mutant("forgets the causal mask", replace=("(distance >= 0) & ", ""), expect="ring_cache"),
        Mutant(
            "writes the whole chunk through one index",
            replace=(
                (
                    "        kept = new[-self.window:]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
                    "k[-self.window:], v[-self.window:]"
                ),
                "        self.keys[new % self.window], self.values[new % self.window] = k, v",
            ),
            expect="two tokens into one slot",
        ),
        Mutant(
            "one window for the whole chunk",
            replace=(
                "torch.arange(max(0, self.length - self.window), self.length)",
                "torch.arange(min(self.length, max(0, self.length + len(k) - self.window)), self.length)",
            ),
            expect="gather window - 1 positions before the chunk",
        ),
        Mutant(
            "remembers everything a second time",
            replace=(
                "        out = masked_attention(q, keys, values, allowed)\n",
                """
        self.all_k = torch.cat([getattr(self, "all_k", k[:0]), k])
        self.all_v = torch.cat([getattr(self, "all_v", v[:0]), v])
        distance = new[:, None] - torch.arange(len(self.all_k))
        out = masked_attention(q, self.all_k, self.all_v, (distance >= 0) & (distance < self.window))
""",
            ),
            expect="the output does not follow",
        ),
        Mutant(
            "a tensor of positions",
            replace=("        return held\n", "        return torch.tensor(held)\n"),
            expect="an int64 tensor, not a list",
        ),
        Mutant(
            "a list of tensors",
            replace=("        return held\n", "        return list(torch.tensor(held))\n"),
            expect="an int64 tensor, not an int",
        ),
        Mutant("forgets a method", replace=("def step(", "def steps("), expect="RingCache has no 'step'"),
    ],
    "repair_positions": [
        Mutant(
            "still one off",
            replace=(
                "decode(ids[num_computed:], num_computed)",
                "decode(ids[num_computed:], num_computed and len(ids))",
            ),
            expect="start in call 2",
        ),
        Mutant(
            "one off to the other side",
            replace=(
                "decode(ids[num_computed:], num_computed)",
                "decode(ids[num_computed:], max(0, num_computed - 1))",
            ),
            expect="start in call 2",
        ),
        Mutant(
            "repairs the position, keeps the needless call",
            source="""
def cached_generate(decode, prompt_ids, max_tokens, eos_id=None):
    ids = list(prompt_ids)
    logits = decode(ids, 0)
    while len(ids) < len(prompt_ids) + max_tokens:
        ids.append(int(logits.argmax()))
        logits = decode(ids[-1:], len(ids) - 1)
        if ids[-1] == eos_id:
            break
    return ids[len(prompt_ids):]
""",
            expect="the number of calls for",
        ),
        Mutant(
            "brings the whole text again", replace=("        num_computed = len(ids)\n", ""), expect="start in call 2"
        ),
        Mutant(
            "drops the token that ends it",
            replace=(
                "        ids.append(int(logits.argmax()))\n        if ids[-1] == eos_id:\n            break\n",
                "        if int(logits.argmax()) == eos_id:\n            break\n        ids.append(int(logits.argmax()))\n",
            ),
            expect="the list of new token ids",
        ),
        Mutant(
            "does not stop",
            replace=("        if ids[-1] == eos_id:\n            break\n", ""),
            expect="The text ends with its first token",
        ),
        Mutant(
            "takes token 0 for no eos_id",
            replace=("        if ids[-1] == eos_id:", "        if eos_id and ids[-1] == eos_id:"),
            expect="0 is a token id as good as any",
        ),
        Mutant(
            "never counts what it chose",
            replace=(
                "        ids.append(int(logits.argmax()))\n        if ids[-1] == eos_id:\n            break\n",
                "",
            ),
            expect="the loop does not end",
        ),
        Mutant(
            "tensors for token ids",
            replace=("ids.append(int(logits.argmax()))", "ids.append(logits.argmax())"),
            expect="an int64 tensor, not an int",
        ),
    ],
    "rewindable_ring": [
        Mutant(
            "forgets how far it had been",
            replace=("self.high = max(self.high, self.length)", "self.high = self.length"),
            expect="largest length so far",
        ),
        Mutant(
            "checks each rewind alone",
            replace=("self.length - k < max(0, self.high - self.slack)", "k > min(self.slack, self.length)"),
            expect="largest length so far",
        ),
        Mutant(
            "no slack in the storage",
            replace=("        slots = self.window + self.slack\n", "        slots = self.window\n"),
            expect="the output [query, head, dimension]",
        ),
        Mutant(
            "takes the slack for part of the window",
            replace=("(distance < self.window)", "(distance < slots)"),
            expect="rewindable_ring",
        ),
        Mutant(
            "shrinks before it refuses",
            source="""
class RewindableRing:
    def __init__(self, window, slack, num_kv_heads, head_dim):
        self.keys, self.values = torch.zeros(window + slack, num_kv_heads, head_dim), torch.zeros(window + slack, num_kv_heads, head_dim)
        self.window, self.slack, self.length, self.high = window, slack, 0, 0

    def step(self, q, k, v):
        slots, old = self.window + self.slack, torch.arange(max(0, self.length - self.window + 1), self.length)
        new = torch.arange(self.length, self.length + k.shape[0])
        distance = new[:, None] - torch.cat([old, new])
        out = masked_attention(q, torch.cat([self.keys[old % slots], k]), torch.cat([self.values[old % slots], v]), (distance >= 0) & (distance < self.window))
        self.keys[new[-slots:] % slots], self.values[new[-slots:] % slots] = k[-slots:], v[-slots:]
        self.length += k.shape[0]
        self.high = max(self.high, self.length)
        return out

    def rewind(self, k):
        self.length -= k
        if k < 0 or self.length < max(0, self.high - self.slack):
            raise ValueError("too far")
""",
            expect="length after moves",
        ),
        Mutant("refuses to take back nothing", replace=("if k < 0 or", "if k <= 0 or"), expect="k = 0 is allowed"),
        Mutant(
            "takes back more than there is",
            replace=("self.length - k < max(0, self.high - self.slack)", "self.length - k < self.high - self.slack"),
            expect="no more can be taken back than there is",
        ),
        Mutant(
            "writes the whole chunk through one index",
            replace=(
                "        kept = new[-slots:]\n        self.keys[kept % slots], self.values[kept % slots] = k[-slots:], v[-slots:]\n",
                "        self.keys[new % slots], self.values[new % slots] = k, v\n",
            ),
            expect="two tokens into one slot",
        ),
        Mutant(
            "remembers everything a second time",
            replace=(
                "        out = masked_attention(q, keys, values, allowed)\n",
                """
        self.all_k = torch.cat([getattr(self, "all_k", k)[:self.length], k]) if self.length else k
        self.all_v = torch.cat([getattr(self, "all_v", v)[:self.length], v]) if self.length else v
        distance = new[:, None] - torch.arange(len(self.all_k))
        out = masked_attention(q, self.all_k, self.all_v, (distance >= 0) & (distance < self.window))
""",
            ),
            expect="the output does not follow",
        ),
    ],
}
