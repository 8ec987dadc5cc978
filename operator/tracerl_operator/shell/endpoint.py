"""What kubelets and Prometheus ask: /healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

Check = Callable[[], str | None]
"""Says what is wrong; None when all is well."""


async def listen(
    host: str, port: int, *, health: Check, readiness: Check, metrics: Callable[[], bytes]
) -> web.AppRunner:
    """Answer until the runner is cleaned up. OSError where the address cannot be had."""

    def answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            wrong = check()
            return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

        return handler

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application()
    app.router.add_get("/healthz", answer(health))
    app.router.add_get("/readyz", answer(readiness))
    app.router.add_get("/metrics", exposition)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
