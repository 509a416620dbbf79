"""Checks of chapter 24: a fleet that survives a loss, buying or renting, the cheapest probes. Built in chapter 24."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch24_oracle import Machine, capacity_of, fleets, least_costs, ledger, stays_cheaper
from minillm.book.checks.patience import within

check_cheapest_fleet = Checker(
    "cheapest_fleet", hint="After the loss of the largest machine, the rest must still hold the peak.")  # fmt: skip
check_stays_cheaper = Checker("stays_cheaper", hint="A later purchase can put the two sums back in order.")
check_find_saturation = Checker(
    "find_saturation", hint="A probe that fails costs more, so probe nearer to the rate that is known to hold.",
    forbid=("minillm.bench.load.search.find_rate",))  # fmt: skip

GOOD, SMALL = (300, [(5, True), (10, True), (20, True)]), (100, [(2, True), (6, True), (8, False)])


@check_cheapest_fleet.part("example")
def _fleet_example(case: Case) -> None:
    _fleet(case, {"large": GOOD}, 20, "one kind of machine: one for the peak, one to lose")
    _fleet(case, {"large": GOOD, "small": SMALL}, 30, "two kinds may be mixed")


@check_cheapest_fleet.part("edges")
def _fleet_edges(case: Case) -> None:
    _fleet(case, {"large": GOOD}, 1, "a tiny peak still needs two machines")
    _fleet(case, {"large": GOOD}, 21, "a little more than one machine holds")
    _fleet(case, {"large": GOOD}, 40, "exactly two machines, and one to lose")
    _fleet(case, {"small": SMALL, "large": GOOD}, 18, "losing the large machine costs more than losing a small one")
    lucky = (90, [(30, True), (10, True), (20, False)])
    _fleet(case, {"lucky": lucky}, 15, "a probe at 30 held after one at 20 had failed: it counts for nothing")
    _fleet(case, {"broken": (1, [(1, False), (50, True)]), "large": GOOD}, 20, "a machine whose least probe fails")
    _fleet(case, {"unprobed": (1, []), "large": GOOD}, 20, "a machine that was never probed holds nothing")
    mixed = {"large": (200, [(20, True)]), "small": (90, [(6, True)])}
    _fleet(case, mixed, 26, "two large machines and a small one cost less than any fleet of one kind")
    pair = {"one": (100, [(5, True)]), "two": (150, [(10, True)])}
    _fleet(case, pair, 10, "two fleets with the same price: the one with fewer machines")
    twins = {"first": (100, [(10, True)]), "second": (100, [(10, True)])}
    _fleet(case, twins, 20, "equal price and size: more of the machine that is listed first")
    case.raises(ValueError, case.student, {"broken": (1, [(1, False)])}, 5, hint="No fleet holds the peak.")
    case.raises(ValueError, case.student, {}, 5, hint="No machine at all.")
    case.raises(ValueError, case.student, {"large": GOOD}, 0, hint="A peak of 0 is a mistake of the caller.")


@check_cheapest_fleet.part("random")
def _fleet_random(case: Case) -> None:
    for _ in range(40):
        machines = {}
        for name in "ABC"[: case.randint(1, 4)]:
            rates = sorted(case.rng.sample(range(3, 30), case.randint(1, 5)))
            probes = [(rate, case.rng.random() < 0.85) for rate in rates]
            case.rng.shuffle(probes)
            machines[name] = (case.randint(1, 12) * 20, probes)
        peak = case.randint(1, 60)
        if fleets(machines, peak):
            _fleet(case, machines, peak, "random machines and probes")


def _fleet(case: Case, machines: dict[str, Machine], peak: int, told: str) -> None:
    got, found = case.call(machines, peak), fleets(machines, peak)
    sizes = {name: capacity_of(probes) for name, (_, probes) in machines.items()}
    hint = f"Here {told}. Capacities: {sizes}; peak {peak}."
    case.true(isinstance(got, dict), f"the result is {got!r}, not a dict", hint=hint)
    case.true(set(got) <= set(machines), f"the fleet {got} has a machine that was not offered", hint=hint)
    case.true(all(count > 0 for count in got.values()), f"the fleet {got} lists a machine 0 times", hint=hint)
    price, size, _ = found[0][0]
    left = sum(sizes[name] * count for name, count in got.items()) - max((sizes[name] for name in got), default=0)
    case.true(left >= peak, f"after the loss of its largest machine {got} holds {left}, the peak is {peak}", hint=hint)
    paid = sum(machines[name][0] * count for name, count in got.items())
    case.true(paid == price, f"{got} costs {paid} cents an hour; {found[0][1]} holds the peak for {price}", hint=hint)
    count = sum(got.values())
    case.true(count == size, f"{got} has {count} machines; {found[0][1]} costs the same with {size}", hint=hint)
    case.equal(got, found[0][1], "the fleet, of those with the same price and size,", hint=hint)


@check_stays_cheaper.part("example")
def _stays_example(case: Case) -> None:
    _stays(case, [10] * 6, 10, 250, 10, 20, "one machine, bought in the first month, saves 80 a month")
    _stays(case, [10] * 3, 10, 250, 10, 20, "the same, and three months are not enough")


@check_stays_cheaper.part("edges")
def _stays_edges(case: Case) -> None:
    _stays(case, [10, 10, 10, 10, 30, 30, 30, 30], 10, 200, 10, 20, "the first crossing does not last")
    _stays(case, [10, 10, 10, 10, 30, 30], 10, 200, 10, 20, "after month 5 two more machines put it back")
    _stays(case, [10, 10, 2, 10], 10, 100, 5, 10, "a machine that idles still costs its running, and is not sold")
    _stays(case, [10], 10, 80, 10, 20, "equal sums count as not above")
    _stays(case, [10], 10, 81, 10, 20, "one cent above")
    _stays(case, [0, 0, 10], 10, 50, 10, 20, "no demand, no machine, and 0 is not above 0")
    _stays(case, [11], 100, 50, 10, 20, "a little more than one machine serves: two are bought")
    _stays(case, [5, 10, 15, 20], 10, 10, 5, 1, "a machine more in each month")
    case.raises(ValueError, case.student, [], 10, 80, 10, 20, hint="Without a month there is no answer.")
    case.raises(ValueError, case.student, [10], 10, 80, 0, 20, hint="A machine that serves nothing.")


@check_stays_cheaper.part("random")
def _stays_random(case: Case) -> None:
    for _ in range(80):
        grows = case.rng.random() < 0.6
        demand = [case.randint(0, 12) + (2 * month if grows else 0) for month in range(case.randint(1, 25))]
        _stays(
            case, demand, case.randint(1, 12), case.randint(1, 400), case.randint(3, 15), case.randint(0, 40), "random"
        )


def _stays(case: Case, demand: list[int], api: int, price: int, per_month: int, running: int, told: str) -> None:
    got, rows = case.call(demand, api, price, per_month, running), ledger(demand, api, price, per_month, running)
    month, saving = stays_cheaper(rows)
    shown = "; ".join(f"month {i + 1}: {n} owned, own {own}, API {api}" for i, (n, own, api) in enumerate(rows[:8]))
    hint = f"Here {told}. {shown}{'; ...' if len(rows) > 8 else ''}."
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not a pair", hint="(month, saving)")
    case.equal(got[1], saving, "the saving at the end (cents)", hint=hint)
    case.true(got[0] == month, f"the month is {got[0]!r}; expected {month!r}", hint=hint)


@check_find_saturation.part("example")
def _saturation_example(case: Case) -> None:
    _saturate(case, 7, 1, 1)
    _saturate(case, 7, 1, 3)


@check_find_saturation.part("edges")
def _saturation_edges(case: Case) -> None:
    with within(case, "150 rates", "Work out the least cost of each number of candidates once, not again and again."):
        _saturate(case, 150, 2, 5, answers=(0, 1, 75, 150))
    for num_rates, passing, failing in ((0, 1, 1), (1, 1, 5), (2, 1, 10), (8, 1, 1), (15, 1, 1), (16, 1, 1)):
        _saturate(case, num_rates, passing, failing)
    _saturate(case, 12, 1, 100)  # one failure costs more than all passes: from below, one by one
    _saturate(case, 12, 7, 1)  # a pass may be the more expensive one


@check_find_saturation.part("random")
def _saturation_random(case: Case) -> None:
    with within(case, "a search among at most 50 rates, twelve times", "Fill the table once for each call."):
        for _ in range(12):
            _saturate(case, case.randint(2, 50), case.randint(1, 8), case.randint(1, 20))


def _saturate(case: Case, num_rates: int, passing: int, failing: int, answers: tuple[int, ...] | None = None) -> None:
    """Every possible answer, or those given: the right rate, and no more cost than the best plan's worst case."""
    least = least_costs(num_rates + 1, passing, failing)[-1]
    for answer in range(num_rates + 1) if answers is None else answers:
        probed: list[int] = []

        def probe(rate: int, answer: int = answer, probed: list[int] = probed) -> bool:
            case.true(
                isinstance(rate, int) and 1 <= rate <= num_rates,
                f"probe({rate!r}) was called; the rates are 1 to {num_rates}",
            )
            probed.append(rate)
            return rate <= answer

        got = case.call(probe, num_rates, passing, failing)
        costs = f"a pass costs {passing}, a failure {failing}"
        hint = f"{num_rates} rates, {costs}; the promise holds up to {answer}. Probed: {probed}."
        case.equal(got, answer, "the saturation rate", hint=hint)
        spent = sum(passing if rate <= answer else failing for rate in probed)
        case.true(
            spent <= least,
            f"the probes {probed} cost {spent}; {least} is enough whatever the answer is ({num_rates} rates, {costs})",
            hint=None,
        )
