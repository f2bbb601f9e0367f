"""Parts of the simulated cluster: event loop, caches, links and engines. `traces.simulator` puts them together."""
