// When drafting pays: the arithmetic of jaxspec/bench/simulate/breakeven.py, for a browser. A test compares the two.
"use strict";

const model = {
  // By straight lines; beyond the ends the last one goes on.
  interpolate(xs, ys, x) {
    if (xs.length === 1) return ys[0];
    let at = 1;
    while (at < xs.length - 1 && x > xs[at]) at += 1;
    const share = (x - xs[at - 1]) / (xs[at] - xs[at - 1]);
    return ys[at - 1] + share * (ys[at] - ys[at - 1]);
  },

  // Tokens a round and request, bonus included, when every draft is right with this chance.
  length(rate, depth) {
    let total = 0;
    for (let i = 0; i <= depth; i += 1) total += rate ** i;
    return total;
  },

  // Seconds of a round; draftCost: of a draft pass as a share of a plain step, null: the device's.
  seconds(c, batch, context, depth, draftCost = null) {
    const verify = model.interpolate(c.tokens, c.verify, batch * (depth + 1)) + c.per_context * batch * context;
    if (!depth) return verify;
    if (draftCost === null) return verify + depth * model.interpolate(c.requests, c.draft, batch);
    return verify + depth * draftCost * model.seconds(c, batch, context, 0);
  },

  // Tokens a second over plain decoding's.
  speedup(c, batch, context, depth, rate, draftCost = null) {
    const plain = model.seconds(c, batch, context, 0);
    return (model.length(rate, depth) * plain) / model.seconds(c, batch, context, depth, draftCost);
  },

  // The depth with the greatest speed-up; 0 where drafting does not pay.
  bestDepth(c, batch, context, rate, draftCost = null) {
    let best = 0;
    let most = 1;
    for (let depth = 1; depth <= c.deepest; depth += 1) {
      const value = model.speedup(c, batch, context, depth, rate, draftCost);
      if (value > most) [best, most] = [depth, value];
    }
    return best;
  },

  // The least acceptance at which that depth pays; null where even 1 does not.
  breakEven(c, batch, context, depth, draftCost = null) {
    if (depth < 1 || model.speedup(c, batch, context, depth, 1, draftCost) < 1) return null;
    let low = 0;
    let high = 1;
    for (let i = 0; i < 40; i += 1) {
      const middle = (low + high) / 2;
      if (model.speedup(c, batch, context, depth, middle, draftCost) < 1) low = middle;
      else high = middle;
    }
    return high;
  },
};

if (typeof module !== "undefined") module.exports = model;
