"""Serves a policy as a chat-completions endpoint, for an Actor behind `actor.base_url`:

python launch/serve_policy.py --config=configs/agentpo_toy.py [--policy=DIR] [--port=8001]

The policy is the frozen Actor of a config whose actor.kind is "policy", else its model, with that
config's template, engine and precision; --policy: another checkpoint in the Hugging Face layout.
What is served and how: mas_jax/sampling/api_server.py.
"""

import logging

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from mas_jax.agents.policy_endpoint import policy_complete
from mas_jax.learning import actors, process

try:
    from mas_jax.retrieval import http_service
    from mas_jax.sampling import api_server
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; a server needs pip install 'mas_jax[serve]'") from error

CONFIG = config_flags.DEFINE_config_file("config", None, "such as configs/agentpo_toy.py")
POLICY = flags.DEFINE_string("policy", "", "directory of a policy; empty for the config's")
NAME = flags.DEFINE_string("name", "policy", "of the model, as requests have it")
HOST = flags.DEFINE_string("host", "127.0.0.1", "0.0.0.0 serves other machines, without a password")
PORT = flags.DEFINE_integer("port", 8001, "port to listen on", lower_bound=1, upper_bound=65535)
flags.mark_flag_as_required("config")


def place(config: ConfigDict) -> None:
    """Puts the flag's policy where the config's stands."""
    if POLICY.value:
        voice = config.actor if config.actor.kind == "policy" else config.model
        voice.checkpoint = POLICY.value


def main(argv: list[str]) -> None:
    """Loads and serves until SIGTERM or Ctrl-C, then answers what is in progress and ends."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    config = CONFIG.value
    process.start()
    try:
        listener = http_service.listen(HOST.value, PORT.value)
        place(config)
        own = actors.load_local(config)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    complete = policy_complete(own.sample, chat=own.chat, policy=own.policy, context=own.context)
    application = api_server.make_app(complete, model=NAME.value, max_tokens=own.context)
    url = f"http://{HOST.value}:{PORT.value}/v1"
    logging.info("serving %s at %s; --config.actor.kind=api --config.actor.base_url=%s "
                 "--config.actor.model=%s", own.policy, url, url, NAME.value)  # fmt: skip
    http_service.make_server(application).run(sockets=[listener])


if __name__ == "__main__":
    app.run(main)
