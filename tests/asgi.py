"""Requests to an application without a socket.

first, second = ask(app, ("GET", "/health", {}), ("POST", "/v1/x", b"{"))   # one after the other
both = ask(app, one, other, at_once=True)
"""

import asyncio
import json

import httpx2


def ask(app, *requests, at_once=False):
    """Responses to (method, path, body); bytes are sent as they are."""

    async def _run():
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://app") as client:
            calls = [
                client.request(
                    method, path, content=body if isinstance(body, bytes) else json.dumps(body)
                )
                for method, path, body in requests
            ]
            if at_once:
                return await asyncio.gather(*calls)
            return [await call for call in calls]

    return asyncio.run(_run())
