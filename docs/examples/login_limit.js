const { createHash, randomBytes } = require('node:crypto');
const { readFileSync } = require('node:fs');

// `send` sends a command and resolves to its reply; with the package `redis`: (...words) => client.sendCommand(words)

const PREFIX = 'quota:inbound:';
const script = readFileSync('scripts/inbound_log.lua', 'utf8');

/** Whether `visitor` may try to log in now, and if not, in how many ms. Throws when the server cannot answer. */
async function admit(send, visitor, number = 3, windowMs = 10000) {
  const fixed = PREFIX + '{salts}:fixed';
  for (const field of ['shard', '0']) await send('HSETNX', fixed, field, randomBytes(32).toString('hex'));
  await send('PEXPIRE', fixed, String(70 * 86400000));
  const words = await send('HGETALL', fixed);
  const salts = new Map();
  for (let n = 0; n < words.length; n += 2) salts.set(words[n], words[n + 1]);
  const nameOf = (salt) =>
    createHash('blake2b512').update(Buffer.from(salt, 'hex')).update(visitor).digest().subarray(0, 8);
  const shard = nameOf(salts.get('shard')).readUInt16BE(6) & 16383;
  salts.delete('shard');
  const permanent = [...salts].map(([sinceMs, salt]) => [Number(sinceMs), salt]).sort((a, b) => b[0] - a[0]);
  let nowMs = Date.now();
  for (;;) {
    const window = Math.floor(nowMs / windowMs);
    const names = [window, window - 1].map((period) =>
      nameOf((permanent.find(([sinceMs]) => sinceMs <= period * windowMs) || permanent.at(-1))[1]));
    const keys = names.map((name, n) => `${PREFIX}{${shard}}:login:l${windowMs}:${window - n}:${name.toString('hex')}`);
    const reply = await send('EVAL', script, '2', ...keys, '0', '1', '0', String(number), String(windowMs), '0',
      String(window), ...names);
    nowMs = reply[1];
    if (reply[0] >= 0) return { admitted: reply[0] === 1, now_ms: nowMs, retry_after_ms: reply[4] };
  }
}
