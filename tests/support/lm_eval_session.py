"""A session of lm-eval: the log-likelihoods of pairs of a context and its continuation, by a server.

It runs in an environment of its own: arguments are the server's URL, the model, the folder of its tokenizer and the pairs
as JSON; the result is printed as JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url, model, folder, pairs = sys.argv[1:]
    api = LocalCompletionsAPI(
        base_url=f"{url}/completions",
        model=model,
        tokenizer=folder,
        tokenizer_backend="huggingface",
        max_length=255,
        batch_size=2,
    )
    given = json.loads(pairs)
    instances = [Instance("loglikelihood", {}, tuple(pair), index) for index, pair in enumerate(given)]
    rolling = [Instance("loglikelihood_rolling", {}, ("".join(given[0]) * 3,), 0)]
    found = {"pairs": api.loglikelihood(instances), "rolling": api.loglikelihood_rolling(rolling)}
    print(json.dumps(found | {"first": api.prefix_token_id}))


if __name__ == "__main__":
    main()
