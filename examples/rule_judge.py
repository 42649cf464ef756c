"""A stand-in for a judge model: a program that grades sums by a rule, behind the API that ``reward=judge`` calls.

Run ``python examples/rule_judge.py``, then ``cookbook train experiment=grpo_judge``. The grade is 10 for the exact sum, and one
point less for each unit of difference.
"""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8001


def grade(question: str) -> int:
    """Return the grade, 0 to 10, of the last number in the answer; 0 without a sum or a number."""
    asked = re.search(r"(\d+)\+(\d+)=", question)
    answered = re.search(r"<answer>(.*?)</answer>", question, re.DOTALL)
    numbers = re.findall(r"\d+", answered[1]) if answered else []
    if asked is None or not numbers:
        return 0
    return max(0, 10 - abs(int(asked[1]) + int(asked[2]) - int(numbers[-1])))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"The rule was applied.\nScore: {grade(body['messages'][0]['content'])}"
        message = {"role": "assistant", "content": text}
        data = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=PORT)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"grading sums at http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
