"""The gated delta rule over states in the pool: a token of each request, or many tokens of one.

Files:
