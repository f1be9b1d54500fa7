"""What an audit found, from the JSON that pip-audit wrote. Exits with 1 if anything is vulnerable.

pip-audit calls it "no known vulnerabilities" where it could ask about nothing: that counts as skipped, and is said.
"""

import json
import sys


def main(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["dependencies"]
    except (OSError, ValueError, LookupError) as error:
        print(f"audit: skipped: nothing was audited ({error}); see build/audit.log")
        return 0
    asked = [one for one in found if "skip_reason" not in one]
    if not asked:
        print(f"audit: skipped: the database knows none of {len(found)} packages, so nothing was audited")
        return 0
    vulnerable = [one for one in asked if one["vulns"]]
    for one in vulnerable:
        for known in one["vulns"]:
            print(f"audit: {one['name']} {one['version']}: {known['id']}, mended in {known['fix_versions'] or 'none'}")
    print(f"audit: {len(asked)} of {len(found)} packages audited, {len(vulnerable)} vulnerable")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
