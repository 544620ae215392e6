"""`penstock doctor`: what this machine has, what is missing, what to do."""

import sys

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def doctor_command(as_json: bool) -> None:
    """Say what this machine has, what is missing, and what to do about it.

    The exit code is 0 if the embedded default (`penstock demo`) can run here, else 1.

    \b
    Examples:
      penstock doctor
      penstock doctor --json
    """
    from penstock.service.doctor import examine_for_doctor, render_doctor_findings

    findings = examine_for_doctor()
    click.echo(render_doctor_findings(findings, as_json=as_json))
    sys.exit(0 if all(finding.ok for finding in findings if finding.required) else 1)
