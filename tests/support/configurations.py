"""Configurations that several folders of tests share."""


def limited(units: int, more: str = "", *, ledger: str = "sqlite:///ledger.db") -> str:
    """A ledger, and a credential that may spend so many units in 24 hours."""
    return f"""
[ledger]
url = "{ledger}"
[credentials.main]
api = "youtube-v3"
project = "p"
limits = [{{ name = "day", units = {units}, window = "24h" }}]
{more}
"""


def configuration(
    address: str,
    jobs: str,
    *,
    units: int = 9_500,
    ledger: str = "sqlite:///ledger.db",
    unavailable: str = "",
    store: str = "",
) -> str:
    """A configuration with one credential, a ledger and a store in the folder, and these tables of jobs."""
    return f"""
[ledger]
url = "{ledger}"
{unavailable and f"unavailable = {unavailable}"}
[credentials.main]
api = "youtube-v3"
key = "file:key"
endpoint = "{address}"
limits = [{{ name = "day", units = {units}, window = "24h" }}]
[store]
url = "sqlite:///videos.db"
{store}
{jobs}
"""


def both_windows(units: int, *, credential: str = "", pacing: bool = False) -> str:
    """A credential with these lines that may spend so many units in any 24 hours and in a day of upstream's."""
    return f"""
[credentials.main]
api = "youtube-v3"
{credential}
[[credentials.main.limits]]
name = "day"
units = {units}
window = "24h"
[[credentials.main.limits]]
name = "pacific-day"
units = {units}
window = {{ calendar = "day", zone = "America/Los_Angeles" }}
pacing = {str(pacing).lower()}
"""


EVERY_KEY = """
textfile = "metrics"
notify = { command = ["tell", "tell"], url = "env:HOOK", stale = "6h", insecure_endpoint = true }
store = { url = "sqlite:///videos.db", retention = "7d", name = "cluster" }
[ledger]
url = "rediss://127.0.0.1:6379/0"
username = "quota"
ssl_ca_certs = "ca.pem"
ssl_cert_reqs = "required"
ssl_check_hostname = true
name = "production"
unavailable = { max_cost = 1, allowance = 50, machines = 2 }
[credentials.main]
api = "youtube-v3"
project = "my-project"
key = "env:YOUTUBE_API_KEY"
auth = "adc"
endpoint = "http://127.0.0.1:8765"
cloud_project = "my-project-1"
insecure_endpoint = false
limits = [
  { name = "day", quota = 10_000, headroom = 500, window = "24h", count = "calls", bucket = "units" },
  { name = "part", quota = 10_000, headroom = "5%", window = "1h", per = "job", bucket = ["units"] },
  { name = "paced", units = 9_000, window = { calendar = "month", zone = "UTC", day = 15 }, pacing = true },
  { name = "search", units = 4_000, window = "7d", methods = ["search.list"], jobs = ["trending"] },
  { name = "week", units = 9_000, window = { calendar = "week", zone = "UTC" } },
]
[jobs.trending]
credential = "main"
fetch = "trending"
regions = ["US", "GB"]
pages = 4
schedule = "*/30 * * * *"
timezone = "Europe/Berlin"
stagger = "2m"
jitter = "30s"
misfire_grace = "10m"
leave = { day = 500 }
max_units = 1_000
max_body_mb = 16
max_answer_s = 120
max_items = 10_000
machines = "each"
ping = "file:ping"
tables = { comments = { key = ["thread", "id"], history = ["likes"] } }
options = { category = "10" }
[jobs.own]
fetch = "package.module:function"
schedule = "every 45m"
leave = 7
[inbound]
url = "redis://127.0.0.1:6379/1"
password = "p"
exempt = ["/healthz"]
trusted_proxies = ["10.0.0.0/8"]
forwarded = "x-forwarded-for"
key_field = "X-API-Key"
x_fields = true
[inbound.search]
path = "/search"
methods = ["GET"]
limits = [{ limit = 5, window = "1s" }, { limit = 50, window = "60s" }]
[inbound.default]
limit = 600
window = "60s"
algorithm = "log"
cost = 1
fail = "open"
shadow = false
count_rejected = true
"""
"""One that has every key, of the notations of each several."""
