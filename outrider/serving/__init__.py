"""What every gRPC process does: server, health, drain, status mapping, channel, frames, settings, telemetry.

A service's `__main__`:

    async def serve(settings: TargetSettings) -> None:
        engine = Engine(settings)
        server = Server(settings, name="target", drain=engine.drain)
        server.register(add_TargetServiceServicer_to_server, TargetServicer(engine), "outrider.v1.TargetService")
        await server.run()  # until SIGTERM; then the drain, then it returns

    def main() -> None:
        settings = load_settings(TargetSettings, program="python -m target_service")  # a ServingSettings
        configure_logging(service="target", level=settings.log_level, form=settings.log_format)
        run_process(serve(settings))

Servicers raise the exceptions of `outrider.errors`; the server turns them into statuses, and callers get them back
with `with peer_errors(): ...`. Frames leave through a `FrameOutbox`; channels are opened with `open_channel`.
"""
