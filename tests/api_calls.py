"""Calls of an endpoint client in tests: quick, each in an event loop of its own."""

import asyncio

from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_request import Request

ASK = ({"role": "user", "content": "Is it?"},)
CALL = {"model": "m", "temperature": 0.0, "max_tokens": 100}
REQUEST = Request(ASK, "m", 0.0, 100)


def endpoint(server, **changes) -> Endpoint:
    """Quick retries, no key; the rest as it is by default."""
    fields = {"backoff_s": 0.001, "timeout_s": 20.0, "key_variable": ""} | changes
    return Endpoint(base_url=server.url, **fields)


def ask(client: Client, messages=ASK, **changes):
    """One completion in an event loop of its own."""

    async def main():
        try:
            return await client.complete(messages, **(CALL | changes))
        finally:
            await client.close()

    return asyncio.run(main())


def ask_all(client: Client, *calls: dict, messages=ASK) -> list:
    """Completions that are asked for at once; errors stand in their places."""

    async def main():
        tasks = [client.complete(messages, **(CALL | changes)) for changes in calls]
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(main())


async def until(condition) -> None:
    """Lets others run until something holds."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that within 10 s")
