"""The upstream emulator: YouTube Data API v3 on loopback, for `quota demo`, `quota emulate` and tests. Start with
`Emulator`.

    server.py       Emulator: who calls, and what every call gets; says what is counted
    api.py          the methods of the API, over a catalogue
    catalogue.py    what there is to list: generated, or read from saved pages. Its texts are `words.toml`
    usage.py        the count: units by project, bucket and day
    monitoring.py   Cloud Monitoring, which shows that count
    replies.py      a reply, and the errors as upstream words them: `errors.toml`
    wire.py         HTTP
"""

from quota.jobs.emulator.server import Emulator

__all__ = ["Emulator"]
