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
