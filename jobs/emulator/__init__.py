"""The upstream emulator: YouTube Data API v3 on loopback, for `quota demo`, `quota emulate` and tests. Start with
`Emulator`.

    server.py       HTTP, and Emulator: identifies callers, counts and answers their calls
    api.py          the methods of the API, over a catalogue
    catalogue.py    the listed resources: generated from `words.toml`, or read from saved pages
    usage.py        counts units by project, bucket and day
    demo.toml       the configuration of `quota demo`
    replies.py      replies: upstream's errors in its own words (`errors.toml`), its resources in their shape
                    (`resources.toml`)
"""

from quota.jobs.emulator.server import Emulator

__all__ = ["Emulator"]
