"""What is shown holds no secret."""

import pytest

from penstock.secret_text import is_secret_name, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tables=postgresql://shop:s3cret@db:5432/x?a=b", "tables=postgresql://shop:***@db:5432/x?a=b"),
        ("amqp://u:p@ss/w:rd@host/", "amqp://u:***@host/"),
        ("at amqps://u:one@a:5671/ and http://u:two@b", "at amqps://u:***@a:5671/ and http://u:***@b"),
        ("host=db user=shop password=s3cret dbname=x", "host=db user=shop password=*** dbname=x"),
        (
            "postgresql://db/x?user=u&password=s3cret&sslmode=require",
            "postgresql://db/x?user=u&password=***&sslmode=require",
        ),
        ("--conf spark.hadoop.fs.s3a.secret.key=AKIA/x+y", "--conf spark.hadoop.fs.s3a.secret.key=***"),
        ("token_file=/run/token path=/a:b@c", "token_file=/run/token path=/a:b@c"),
        ("http://127.0.0.1:4318/v1/metrics at 12:01", "http://127.0.0.1:4318/v1/metrics at 12:01"),
        ("a bearer token that we know is needed", "a bearer token that we know is needed"),
    ],
)
def test_passwords_are_masked_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("spark.hadoop.fs.s3a.access.key", True),
        ("fs.azure.account.key.store.blob", True),
        ("spark.ssl.keyPassword", True),
        ("spark.kubernetes.authenticate.oauthToken", True),
        ("spark.kubernetes.authenticate.oauthTokenFile", False),
        ("fs.s3a.aws.credentials.provider", False),
        ("spark.driver.memory", False),
    ],
)
def test_a_name_says_whether_its_value_is_secret(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret
