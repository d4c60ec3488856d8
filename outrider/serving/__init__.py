"""What every gRPC process does: server, health, drain, status mapping, channel, frames, settings, telemetry."""
