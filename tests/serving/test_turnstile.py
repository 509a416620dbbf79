"""A crowd passes the turnstile a few at a time, in order, and the loop sees to others in between."""

import asyncio

from minillm.serving.turnstile import Turnstile


def test_a_crowd_passes_a_few_in_a_turn_in_the_order_of_its_calls():
    async def main() -> tuple[list[int], list[int]]:
        turnstile, passed, seen = Turnstile(at_once=3), [], []

        async def pass_through(number: int) -> None:
            await turnstile.enter()
            passed.append(number)

        crowd = asyncio.gather(*(pass_through(number) for number in range(10)))
        while len(passed) < 10:
            seen.append(len(passed))
            await asyncio.sleep(0)
        await crowd
        return passed, seen

    passed, seen = asyncio.run(asyncio.wait_for(main(), 10))
    assert passed == list(range(10))
    assert max(after - before for before, after in zip(seen, [*seen[1:], 10])) == 3


def test_a_request_that_is_cancelled_takes_no_place_and_delays_no_other():
    async def main() -> list[int]:
        turnstile, passed = Turnstile(at_once=1), []

        async def pass_through(number: int) -> None:
            await turnstile.enter()
            passed.append(number)

        crowd = [asyncio.ensure_future(pass_through(number)) for number in range(4)]
        await asyncio.sleep(0)
        crowd[1].cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        await pass_through(4)  # the turnstile still serves requests that come later
        return passed

    assert asyncio.run(asyncio.wait_for(main(), 10)) == [0, 2, 3, 4]


def test_who_comes_alone_passes_at_once_and_no_more_than_a_few_pass_in_a_turn():
    async def main() -> tuple[list[bool], list[int]]:
        turnstile, at_once = Turnstile(at_once=2), []
        for _ in range(3):
            entering = turnstile.enter()
            try:
                entering.send(None)  # it would wait
                at_once.append(False)
            except StopIteration:
                at_once.append(True)
            entering.close()
        passed = []

        async def pass_through(number: int) -> None:
            await turnstile.enter()
            passed.append(number)

        crowd, seen = [asyncio.ensure_future(pass_through(number)) for number in range(6)], []
        while len(passed) < 6:
            seen.append(len(passed))
            await asyncio.sleep(0)
        await asyncio.gather(*crowd)
        return at_once, [after - before for before, after in zip(seen, [*seen[1:], 6])]

    at_once, steps = asyncio.run(asyncio.wait_for(main(), 10))
    assert at_once == [True, True, False] and max(steps) == 2


def test_an_empty_turnstile_leaves_the_loop_alone():
    async def main() -> bool:
        turnstile = Turnstile()
        await turnstile.enter()
        for _ in range(3):
            await asyncio.sleep(0)
        return turnstile._is_turning

    assert asyncio.run(main()) is False
