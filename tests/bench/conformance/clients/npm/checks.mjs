// As checks.py, for clients of node.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

export const baseURL = `${process.argv[2]}/v1`;
export const modelName = process.argv[3];
export const prompt = "Tell me of the sea.";
export const cities = ["Paris", "Oslo"];
export const maxTokens = 24;
export const schema = {
  type: "object",
  properties: { city: { enum: cities } },
  required: ["city"],
  additionalProperties: false,
};

export function requireCity(city) {
  if (!cities.includes(city)) throw new Error(`${city} is none of ${cities}`);
}

export function requireEqual(found, expected) {
  if (found !== expected || !expected) throw new Error(`${found} came, not ${expected}`);
}

export async function report(name, checks) {
  const main = createRequire(import.meta.url).resolve(name);
  const at = main.indexOf(`node_modules${path.sep}${name}`) + `node_modules${path.sep}${name}`.length;
  const { version } = JSON.parse(readFileSync(path.join(main.slice(0, at), "package.json"), "utf8"));
  for (const check of checks) {
    let result = "passed";
    try {
      await check();
    } catch (error) {
      result = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify([`${name} (npm) ${version}`, check.name, result]));
  }
}
