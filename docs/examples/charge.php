<?php
define('RUN', dechex(time()));

/** Charges a call against 9,500 units of any 24 hours. Throws when the ledger does not answer: do not send the call. */
function charge(string $project, string $method, int $units, string $job, string $region, int $port = 6379): array
{
    $script = file_get_contents('scripts/charge.lua');
    $key = RUN . '-' . bin2hex(random_bytes(8));
    $arguments = [
        "quota:{{$project}}:ledger:log", "quota:{{$project}}:ledger:state", "quota:{{$project}}:ledger:corrected",
        0, (int) (microtime(true) * 1000), '', $key, $units, 'units', $method, $job, $region,
        'units|*|*', 9500, $units, 86400000,
    ];
    for ($try = 1; ; $try++) {
        try {
            $redis = new Redis();
            $redis->connect('127.0.0.1', $port, 0.35, null, 0, 0.35);
            $reply = $redis->evalSha(sha1($script), $arguments, 3);
            if ($reply === false && str_starts_with($redis->getLastError(), 'NOSCRIPT')) {
                $redis->clearLastError();
                $reply = $redis->eval($script, $arguments, 3);
            }
            break;
        } catch (RedisException $lost) {
            if ($try === 2) {
                throw $lost;
            }
        }
    }
    if ($reply === false) {
        throw new RuntimeException($redis->getLastError());
    }
    return ['outcome' => $reply[0], 'id' => $reply[1], 'used_units' => $reply[4] ?? null];
}

echo json_encode(charge('demo', 'search.list', 100, 'nightly', 'DE')), "\n";
