const { randomBytes } = require('node:crypto');
const { readFileSync } = require('node:fs');

// `send` sends a command and resolves to its reply; with the package `redis`: (...words) => client.sendCommand(words)

const script = readFileSync('scripts/charge.lua', 'utf8');
const run = Math.floor(Date.now() / 1000).toString(16);

/** Charges a call against 9,500 units of any 24 hours. Throws when the ledger does not answer: do not send the call. */
async function charge(send, project, method, units, job, region) {
  const key = `${run}-${randomBytes(8).toString('hex')}`;
  const keys = ['log', 'state', 'corrected'].map((name) => `quota:{${project}}:ledger:${name}`);
  const words = ['EVAL', script, '3', ...keys, '0', String(Date.now()), '', key, String(units), 'units', method, job,
    region, 'units|*|*', '9500', String(units), '86400000'];
  const [outcome, id, , , used = null] = await send(...words).catch(() => send(...words));
  return { outcome, id, used_units: used };
}
