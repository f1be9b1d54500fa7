<?php
const PREFIX = 'quota:inbound:';

/** Whether $visitor may try to log in now, and if not, in how many ms. Throws when the server cannot answer. */
function admit(Redis $redis, string $visitor, int $number = 3, int $windowMs = 10000): array
{
    foreach (['shard', '0'] as $field) {
        $redis->hSetNx(PREFIX . '{salts}:fixed', $field, bin2hex(random_bytes(32)));
    }
    $redis->pExpire(PREFIX . '{salts}:fixed', 70 * 86400000);
    $salts = $redis->hGetAll(PREFIX . '{salts}:fixed');
    $nameOf = fn (string $salt) => substr(sodium_crypto_generichash(hex2bin($salt) . $visitor, '', 64), 0, 8);
    $shard = unpack('n', $nameOf($salts['shard']), 6)[1] & 16383;
    unset($salts['shard']);
    krsort($salts);
    $script = file_get_contents('scripts/inbound_log.lua');
    $nowMs = (int) (microtime(true) * 1000);
    do {
        $window = intdiv($nowMs, $windowMs);
        $keys = $names = [];
        foreach ([$window, $window - 1] as $period) {
            $salt = end($salts);
            foreach ($salts as $sinceMs => $candidate) {
                if ($sinceMs <= $period * $windowMs) {
                    $salt = $candidate;
                    break;
                }
            }
            $names[] = $nameOf($salt);
            $keys[] = PREFIX . "{{$shard}}:login:l$windowMs:$period:" . bin2hex($nameOf($salt));
        }
        $arguments = [...$keys, 0, 1, 0, $number, $windowMs, 0, $window, ...$names];
        $reply = $redis->evalSha(sha1($script), $arguments, 2) ?: $redis->eval($script, $arguments, 2);
        if ($reply === false) {
            throw new RuntimeException($redis->getLastError());
        }
        [$outcome, $nowMs] = $reply;
    } while ($outcome < 0); // a window has ended meanwhile
    return ['admitted' => $outcome === 1, 'now_ms' => $nowMs, 'retry_after_ms' => $reply[4]];
}

$redis = new Redis();
$redis->connect('127.0.0.1', 6379, 0.25, null, 0, 0.25);
echo json_encode(admit($redis, '203.0.113.7')), "\n";
