"""Checks of chapter 22: a stream that outlives its replicas, an autoscaler for a day. Built in chapter 22."""

from __future__ import annotations

import math

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch22_oracle import Day, floor_of, history, live

check_resumed_stream = Checker(
    "resumed_stream", hint="The client's tokens are the truth: go on behind them, and take nothing twice.")  # fmt: skip
check_autoscaler = Checker(
    "autoscaler", hint="A replica that is ordered now works `delay` intervals later: look ahead that far.",
    forbid=("minillm.engine.scaling.QueueAutoscaler", "minillm.engine.scaling.DeadlineAutoscaler"))  # fmt: skip

STOP = 0


def _stream(case: Case, prompt: list[int], max_tokens: int):
    stream = case.run(case.student, prompt, max_tokens, STOP)
    _submitted(case, stream, prompt, [], 1, max_tokens)
    return stream


def _submitted(case: Case, stream, prompt: list[int], output: list[int], flight: int, max_tokens: int) -> None:
    """The next flight begins with everything that the client has."""
    got = case.run(stream.submit)
    expected = (flight, prompt + output, max_tokens - len(output))
    case.equal(got, expected, "(flight, tokens, tokens left to generate)", hint=f"The client has {output}.")


def _receive(case: Case, stream, flight: int, position: int, tokens: list[int], expected: list[int], told: str) -> None:
    got = case.run(stream.receive, flight, position, tokens)
    case.equal(got, expected, "the tokens for the client", hint=f"Here {told}.")


def _lost(case: Case, stream, flight: int, expected: bool, told: str) -> None:
    got = case.run(stream.lost, flight)
    case.true(got is expected, f"lost({flight}) returned {got!r}; expected {expected}", hint=f"Here {told}.")


def _ended(case: Case, stream, output: list[int], finished: bool) -> None:
    case.equal(stream.output, output, "the output")
    case.true(stream.finished is finished, f"finished is {stream.finished!r}; expected {finished}")


@check_resumed_stream.part("example")
def _stream_example(case: Case) -> None:
    stream = _stream(case, [7, 8], 5)
    _receive(case, stream, 1, 0, [3, 4], [3, 4], "the first two tokens come")
    _lost(case, stream, 1, True, "the replica dies, three tokens are missing")
    _submitted(case, stream, [7, 8], [3, 4], 2, 5)
    _receive(case, stream, 1, 2, [5], [], "a message of the dead replica arrives late")
    _receive(case, stream, 2, 2, [5, 6, 9], [5, 6, 9], "the second replica goes on behind the client's tokens")
    _ended(case, stream, [3, 4, 5, 6, 9], True)


@check_resumed_stream.part("edges")
def _stream_edges(case: Case) -> None:
    stream = _stream(case, [7], 6)
    _receive(case, stream, 1, 0, [3], [3], "the first token comes")
    _receive(case, stream, 1, 0, [3, 4], [4], "a message repeats a token that the client has")
    _receive(case, stream, 1, 1, [4], [], "a message repeats only what the client has")
    case.raises(
        ValueError, stream.receive, 1, 3, [6], hint="Position 3 leaves a gap: the token at position 2 is missing."
    )
    _ended(case, stream, [3, 4], False)
    _receive(case, stream, 1, 2, [], [], "a message without tokens")
    _receive(case, stream, 1, 2, [5, STOP, 9], [5, STOP], "the stop token ends it; what comes behind is dropped")
    _ended(case, stream, [3, 4, 5, STOP], True)
    _receive(case, stream, 1, 4, [9], [], "it has ended")
    _lost(case, stream, 1, False, "the replica dies after the last token: nothing is missing")
    stream = _stream(case, [7], 3)
    _receive(case, stream, 1, 0, [1, 2, 3, 4], [1, 2, 3], "more tokens than max_tokens come")
    _ended(case, stream, [1, 2, 3], True)
    _lost(case, stream, 1, False, "the client has max_tokens tokens, so nothing is missing")
    stream = _stream(case, [7], 4)
    _lost(case, stream, 1, True, "the replica dies before its first token")
    _submitted(case, stream, [7], [], 2, 4)
    _lost(case, stream, 1, False, "the death of the first replica is reported a second time")
    _receive(case, stream, 2, 0, [5], [5], "the second replica begins at the beginning")
    _lost(case, stream, 2, True, "the second replica dies too")
    _submitted(case, stream, [7], [5], 3, 4)
    _receive(case, stream, 2, 1, [6], [], "a late message of the second replica")
    _receive(case, stream, 3, 0, [5, 6], [6], "the third replica sends its copy of the first token too")
    stream = _stream(case, [STOP, 7], 3)
    _receive(case, stream, 1, 0, [3], [3], "the prompt holds the stop token, which ends nothing there")
    _ended(case, stream, [3], False)
    _lost(case, stream, 1, True, "the prompt holds the stop token, and two tokens are missing")
    _submitted(case, stream, [STOP, 7], [3], 2, 3)
    _receive(case, stream, 2, 1, [STOP], [STOP], "the stop token is generated")
    _ended(case, stream, [3, STOP], True)
    stream = _stream(case, [7], 4)
    _lost(case, stream, 1, True, "the replica dies, and no other is there yet")
    _receive(case, stream, 1, 0, [5], [], "no message of a lost flight counts, even before the next flight begins")
    _foreign_flights(case)
    _gaps(case)
    _own_lists(case)
    for wrong in (([], 3, STOP), ([7], 0, STOP)):
        case.raises(
            ValueError, case.student, *wrong, hint="A prompt has at least one token, and max_tokens is at least 1."
        )


def _foreign_flights(case: Case) -> None:
    stream = case.run(case.student, [7], 4, STOP)
    _receive(case, stream, 0, 0, [5], [], "no flight has been submitted yet")
    _lost(case, stream, 0, False, "no flight has been submitted yet")
    _submitted(case, stream, [7], [], 1, 4)
    for number in (0, 2, -1):
        _receive(case, stream, number, 0, [5], [], f"a flight {number} was never submitted")
        _lost(case, stream, number, False, f"a flight {number} was never submitted")
    _submitted(case, stream, [7], [], 2, 4)
    _receive(case, stream, 1, 0, [5], [], "flight 1 was still running when flight 2 began")
    _receive(case, stream, 2, 0, [6], [6], "flight 2 is the newest")
    _lost(case, stream, 2, True, "the newest flight is lost")
    for number in (2, -2):
        _receive(case, stream, number, 1, [8], [], "flight 2 was lost")
        _lost(case, stream, number, False, "flight 2 was lost before")


def _gaps(case: Case) -> None:
    stream = _stream(case, [7], 3)
    for position, tokens in ((1, [5]), (2, [])):
        case.raises(ValueError, stream.receive, 1, position, tokens, hint=f"The token before {position} is missing.")
    _receive(case, stream, 1, 0, [5], [5], "a message with a gap came before, and changed nothing")
    _submitted(case, stream, [7], [5], 2, 3)
    _receive(case, stream, 1, 9, [5], [], "a message of an old flight counts for nothing, wherever it begins")
    _receive(case, stream, 2, 0, [5, 6, STOP], [6, STOP], "the second flight generates all of it")
    _receive(case, stream, 2, 9, [5], [], "a message after the end counts for nothing, wherever it begins")


def _own_lists(case: Case) -> None:
    """What is passed in and what is returned belongs to the caller, who may change it; two streams share nothing."""
    hint = "Keep copies of the lists that come in, and return new lists."
    prompt, tokens = [7, 8], [3]
    stream = case.run(case.student, prompt, 5, STOP, may_change=True)  # so that it gets this very list
    prompt.append(99)
    sent = case.run(stream.submit)
    case.equal(sent, (1, [7, 8], 5), "what submit returns after the caller's prompt was changed", hint=hint)
    got = case.run(stream.receive, 1, 0, tokens, may_change=True)
    case.equal(tokens, [3], "the list of tokens after the call", hint="Do not change the lists that are passed in.")
    for own in (sent[1], tokens, got):
        own.append(99)
    case.equal(stream.output, [3], "the output after the caller changed its lists", hint=hint)
    case.equal(case.run(stream.submit), (2, [7, 8, 3], 4), "what submit returns then", hint=hint)
    other = _stream(case, [1], 1)
    _receive(case, other, 1, 0, [4], [4], "this is a second stream, with one token to generate")
    _ended(case, other, [4], True)
    _ended(case, stream, [3], False)


@check_resumed_stream.part("random")
def _stream_random(case: Case) -> None:
    for _ in range(60):
        truth = [case.randint(1, 90) for _ in range(case.randint(1, 14))]
        if case.rng.random() < 0.5:
            truth[-1] = STOP
        made = history(case.rng, truth)
        stream, got, flight, needs = _stream(case, [5, 6], len(truth)), [], 1, iter(made.needs)
        for event in made.events:
            if event[0] == "tokens":
                got += case.run(stream.receive, *event[1:])
                told = f"the client has {got} after {event}; the whole output is {truth}"
                case.true(got == truth[: len(got)], told, hint="The client gets every token once, in order.")
                continue
            again = next(needs)
            _lost(case, stream, event[1], again, f"the client has {len(got)} of {len(truth)} tokens")
            if again:
                flight += 1
                _submitted(case, stream, [5, 6], got, flight, len(truth))
        _ended(case, stream, truth, True)


# ---- the day ------------------------------------------------------------------------------------------------------

CAPACITY, DELAY, INTERVALS = 20, 4, 288  # requests of a replica in an interval of five minutes; intervals


def made_up_day(rng, peak: float, noise: float, shift: float = 0.0) -> list[int]:
    """Requests in each interval of a day: quiet at night, a morning, an afternoon, and noise."""
    day = []
    for interval in range(INTERVALS):
        hour = (interval / 12 + shift) % 24
        shape = 0.12 + 0.75 * math.exp(-(((hour - 10.5) / 2.2) ** 2)) + math.exp(-(((hour - 16) / 2.6) ** 2))
        day.append(max(0, round(peak * shape * (1 + noise * rng.gauss(0, 1)))))
    return day


@check_autoscaler.part("example")
def _day_example(case: Case) -> None:
    yesterday = made_up_day(case.rng, 400, 0.0)
    day = _live(case, yesterday, list(yesterday), "today is exactly like yesterday")
    _cheap(case, day, yesterday, 1.2, "today is exactly like yesterday")


@check_autoscaler.part("edges")
def _day_edges(case: Case) -> None:
    quiet, steady = [0] * INTERVALS, [200] * INTERVALS
    day = _live(case, quiet, quiet, "no request all day")
    case.true(day.replica_intervals <= 1.05 * INTERVALS, f"an empty day used {day.replica_intervals} intervals; "
              f"{INTERVALS} are enough", hint="One replica stays; desired may return 1 or less.")  # fmt: skip
    day = _live(case, steady, steady, "the same load all day")
    _cheap(case, day, steady, 1.25, "the same load all day")
    day = _live(case, steady, steady, "replicas that serve 10 requests and start in 3 intervals", 10, 3)
    _cheap(case, day, steady, 1.25, "a replica serves 10 requests, and takes 3 intervals to start", 10)
    yesterday = made_up_day(case.rng, 200, 0.0)
    today = [2 * coming for coming in yesterday]
    day = _live(case, yesterday, today, "today is twice as busy as yesterday")
    _cheap(case, day, today, 1.35, "today is twice as busy as yesterday: compare the intervals so far")
    today = [coming // 2 for coming in yesterday]
    day = _live(case, yesterday, today, "today is half as busy as yesterday")
    _cheap(case, day, today, 1.5, "today is half as busy as yesterday")
    spike = list(steady)
    spike[100:112] = [900] * 12
    day = _live(case, steady, spike, "an hour of 900 instead of 200 requests, which yesterday did not have")
    case.true(max(day.backlog[125:]) == 0, f"{max(day.backlog[125:])} requests still wait an hour after the spike",
              hint="Yesterday had no spike, so the backlog has to call for replicas.")  # fmt: skip
    day = _live(case, quiet, steady, "yesterday there was no request at all")
    case.true(
        max(day.backlog[60:]) == 0,
        f"{max(day.backlog[60:])} requests wait after five hours",
        hint="Where yesterday had no request there is no ratio: forecast from today's last intervals.",
    )


@check_autoscaler.part("random")
def _day_random(case: Case) -> None:
    for _ in range(4):
        peak = case.randint(150, 600)
        yesterday = made_up_day(case.rng, peak, 0.06)
        today = made_up_day(case.rng, peak * case.rng.uniform(0.8, 1.3), 0.06, case.rng.uniform(-0.25, 0.25))
        day = _live(case, yesterday, today, "a random day")
        _cheap(
            case,
            day,
            today,
            1.4,
            "today has another peak and other noise, and may be a quarter of an hour early or late",
        )


def _live(
    case: Case, yesterday: list[int], today: list[int], told: str, capacity: int = CAPACITY, delay: int = DELAY
) -> Day:
    scaler = case.run(case.student, list(yesterday), capacity, delay)

    def desired(arrivals: list[int], backlog: int, ready: int, starting: int) -> int:
        wanted = case.run(scaler.desired, arrivals, backlog, ready, starting)
        case.true(isinstance(wanted, int) and not isinstance(wanted, bool), f"desired returned {wanted!r}, not an int",
                  hint=f"Here {told}.")  # fmt: skip
        case.true(wanted <= 10_000, f"desired returned {wanted} replicas", hint=f"Here {told}.")
        return wanted

    return live(desired, today, capacity, delay)


def _cheap(case: Case, day: Day, today: list[int], factor: float, told: str, capacity: int = CAPACITY) -> None:
    least = floor_of(today, capacity)
    case.true(
        day.cost <= factor * least,
        f"the day cost {day.cost:.0f} ({day.replica_intervals} replica intervals, {day.waiting} waits), that is "
        f"{day.cost / least:.2f} times the {least:.0f} of a fleet that knows the day; at most {factor} is allowed",
        hint=f"Here {told}.",
    )
